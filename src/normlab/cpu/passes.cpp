// The passes over x [N, C, *S] on the CPU. Two loops serve all four: sums over rows (moments, and the sums of backward),
// and one line for each row (apply, and the gradient at x). native.py builds this file and calls it.
//
// float32 and bfloat16 accumulate in float32 over a few hundred values, about a value close to their mean, and in
// float64 beyond. So a mean of 1e4 beside a deviation of 1 keeps its digits. Work is cut by the shape alone, never by the
// number of threads: any number of them gives the same bits.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace normlab {

struct Shape {
  int64_t samples, channels, spatial;  // of x
  int64_t rows, parts;                 // rows of a sample; rows of a channel, where rows are equal
  int64_t last;                        // whether x is channels last
  const int64_t* ends;                 // where uneven rows end on the merged axis of channels and space, or null
};

// A coefficient for each row, [1 or N, 1 or R], or for each channel.
template <class K>
struct Values {
  const K* data;
  int64_t by_sample, by_row;
  double at(int64_t n, int64_t r) const { return static_cast<double>(data[n * by_sample + r * by_row]); }
};

struct BFloat16 {
  uint16_t bits;
  BFloat16() = default;
  explicit BFloat16(float value) {
    uint32_t u;
    std::memcpy(&u, &value, 4);
    const uint32_t nearest = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    bits = static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : nearest);
  }
  operator float() const {
    const uint32_t u = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &u, 4);
    return value;
  }
};

template <class T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;  // what loops compute in

template <class A>
using Bits = std::conditional_t<sizeof(A) == 8, int64_t, int32_t>;

// Zero where `keep` is false, whatever the value is. A product with zero would keep NaN, and a branch is no vector.
template <class A>
inline A kept(A value, bool keep) {
  Bits<A> all;
  std::memcpy(&all, &value, sizeof(A));
  all &= -static_cast<Bits<A>>(keep);
  std::memcpy(&value, &all, sizeof(A));
  return value;
}

// Room for numbers of a line, where no load crosses a line of the cache.
template <class A>
class Room {
 public:
  Room(int64_t arrays, int64_t width) : each_((width + 15) / 16 * 16), values_(arrays * each_ + 16) {
    const auto at = reinterpret_cast<uintptr_t>(values_.data());
    first_ = values_.data() + (64 - at % 64) % 64 / sizeof(A);
  }
  A* operator[](int64_t k) { return first_ + k * each_; }

 private:
  int64_t each_;
  std::vector<A> values_;
  A* first_;
};

#define NORMLAB_LOOP __attribute__((noinline))  // inlined into more, the compiler runs out of registers

constexpr int64_t kBlock = 512;       // values that are summed in float32
constexpr int64_t kPiece = 1 << 14;   // values of a row that one thread takes
constexpr int64_t kImage = 1 << 15;   // values of a channels-last image that one thread takes, or 64 positions
constexpr int64_t kAlone = 1 << 15;   // inputs so small that other threads would take longer to wake up
constexpr double kTiny = 1e-30;       // keeps the deviation of a constant row from being zero
constexpr double kFar = 64.0 * 64.0;  // see numerics.py

template <class F>
void share(int64_t units, int64_t values, int64_t threads, F&& work) {
  if (threads < 2 || units < 2 || values < kAlone) return work(0, units);
  const int64_t step = std::max<int64_t>(1, units / (8 * threads));
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (int64_t u = 0; u < units; u += step) work(u, std::min(u + step, units));
}

// --- how work is cut -------------------------------------------------------------------------------------------------

struct Cut {
  int64_t pieces, units;  // of each row, or of each part of a channels-last sample; of all
};

inline int64_t row_begin(const Shape& s, int64_t r) {
  if (s.ends != nullptr) return r == 0 ? 0 : s.ends[r - 1];
  return r * (s.spatial / s.parts);
}

inline Cut cut(const Shape& s) {
  if (s.last) {
    const int64_t most = std::max<int64_t>(64, kImage / s.channels);
    const int64_t pieces = (s.spatial / s.parts + most - 1) / most;
    return {pieces, s.samples * s.parts * pieces};
  }
  const int64_t longest = s.ends != nullptr ? s.spatial : s.spatial / s.parts;
  const int64_t pieces = (longest + kPiece - 1) / kPiece;
  return {pieces, s.samples * s.rows * pieces};
}

// How many positions of a channels-last sample make one line: lines of few values would take long to begin.
inline int64_t folded(const Shape& s) { return std::max<int64_t>(1, 128 / s.channels); }

// The next positions up to `end` of which a mask shows all, or hides all.
template <bool Masked>
struct Run {
  bool shown = true;
  int64_t end;
  Run(const bool* keep, int64_t begin, int64_t end) : end(end) {
    if constexpr (Masked) {
      shown = keep[begin];
      this->end = std::find(keep + begin, keep + end, !shown) - keep;
    }
  }
};

// A piece of a contiguous row.
struct Piece {
  int64_t sample, row, channel, begin, end;  // on the merged axis
  Piece(const Shape& s, const Cut& c, int64_t unit) {
    sample = unit / (s.rows * c.pieces);
    row = unit / c.pieces % s.rows;
    const int64_t from = row_begin(s, row), to = row_begin(s, row + 1), k = unit % c.pieces;
    channel = s.ends != nullptr ? from / s.spatial : row / s.parts;
    begin = std::min(from + k * kPiece, to);
    end = std::min(begin + kPiece, to);
  }
};

// Some positions of a channels-last sample, all of one part.
struct Positions {
  int64_t sample, part, begin, end;
  Positions(const Shape& s, const Cut& c, int64_t unit) {
    const int64_t length = s.spatial / s.parts, k = unit % c.pieces;
    sample = unit / (s.parts * c.pieces);
    part = unit / c.pieces % s.parts;
    begin = part * length + length * k / c.pieces;
    end = part * length + length * (k + 1) / c.pieces;
  }
};

// --- sums ------------------------------------------------------------------------------------------------------------

// Of a row, or of a piece of it: count, mean and squares of deviations; or the sums of dy and of dy * (x - center).
template <bool Moments>
struct Sums {
  double count = 0, first = 0, second = 0;
  void add(const Sums& other) {
    if (Moments && other.count != 0) {
      const double all = count + other.count, apart = other.first - first, part = other.count / all;
      second += other.second + apart * apart * count * part;
      first += apart * part;
      count = all;
    } else if (!Moments) {
      first += other.first;
      second += other.second;
    }
  }
  // From the sum of n values less pivot, and from that of their squares.
  static Sums about(double pivot, double n, double sum, double square) {
    if constexpr (!Moments) return {n, sum, square};
    if (n == 0) return {};
    const double off = sum / n;
    return {n, pivot + off, std::max(square - sum * off, 0.0)};
  }
};

// Where sums go: [2, N, R], in float64 and, for moments, in float32 beside it.
template <bool Moments>
struct Out {
  double* wide;
  float* narrow;
  int64_t all;
  std::atomic<bool> far{false};
  void put(int64_t at, Sums<Moments> sums, double off) {  // off: the rounded center less the center
    if (Moments) {
      sums.second = sums.count != 0 ? std::max(sums.second / sums.count, kTiny) : 1.0;
      if (sums.first * sums.first > kFar * sums.second) far.store(true, std::memory_order_relaxed);
    } else {
      sums.second += sums.first * off;
    }
    if (wide != nullptr) wide[at] = sums.first, wide[all + at] = sums.second;
    if (narrow != nullptr) {
      narrow[at] = static_cast<float>(sums.first);
      narrow[all + at] = static_cast<float>(sums.second);
    }
  }
};

// How many of at most kBlock values of a mask are true. Eight bytes are added at a time: none of them overflows.
inline int64_t shown(const bool* keep, int64_t size) {
  uint64_t bytes = 0;
  const int64_t whole = size / 8;
#pragma omp simd reduction(+ : bytes)
  for (int64_t i = 0; i < whole; ++i) {
    uint64_t eight;
    std::memcpy(&eight, keep + 8 * i, 8);
    bytes += eight;
  }
  constexpr uint64_t even = 0x00ff00ff00ff00ff;
  int64_t number = static_cast<int64_t>(((bytes & even) + (bytes >> 8 & even)) * 0x0001000100010001 >> 48);
  for (int64_t i = 8 * whole; i < size; ++i) number += keep[i];
  return number;
}

template <bool Moments, bool Masked, class T, class A>
NORMLAB_LOOP Sums<Moments> sum_values(const T* x, const T* dy, const bool* keep, int64_t size, A center) {
  Sums<Moments> all;
  for (int64_t begin = 0; begin < size; begin += kBlock, x += kBlock, dy += kBlock, keep += Masked ? kBlock : 0) {
    const int64_t n = std::min(kBlock, size - begin);
    A pivot = center, a = 0, b = 0;
    int64_t count = n;
    if constexpr (Masked) count = shown(keep, n);
    if constexpr (Moments) {  // about the mean of the first values
      const int64_t some = std::min<int64_t>(n, 16);
#pragma omp simd reduction(+ : pivot)
      for (int64_t i = 0; i < some; ++i) {
        if constexpr (Masked) pivot += kept(static_cast<A>(x[i]), keep[i]);
        else pivot += static_cast<A>(x[i]);
      }
      pivot /= static_cast<A>(Masked ? std::max<int64_t>(1, shown(keep, some)) : some);
    }
#pragma omp simd reduction(+ : a, b)
    for (int64_t i = 0; i < n; ++i) {
      A d = static_cast<A>(x[i]) - pivot;
      if constexpr (Masked) d = kept(d, keep[i]);
      A g = d;
      if constexpr (!Moments) g = static_cast<A>(dy[i]);
      if constexpr (!Moments && Masked) g = kept(g, keep[i]);
      a += g;
      b += g * d;
    }
    all.add(Sums<Moments>::about(pivot, static_cast<double>(count), a, b));
  }
  return all;
}

template <bool Moments, bool Masked, class T, class K>
void sum_contiguous(const Shape& s, const T* x, const T* dy, const bool* keep, Values<K> center, int64_t threads,
                    Out<Moments>& out) {
  using A = Wide<T>;
  const Cut c = cut(s);
  const int64_t sample_size = s.channels * s.spatial;
  std::vector<Sums<Moments>> pieces(c.pieces > 1 ? c.units : 0);
  const auto off = [&](int64_t n, int64_t r) {
    const double exact = Moments ? 0.0 : center.at(n, r);
    return static_cast<double>(static_cast<A>(exact)) - exact;
  };
  share(c.units, s.samples * sample_size, threads, [&](int64_t from, int64_t to) {
    for (int64_t unit = from; unit < to; ++unit) {
      const Piece p(s, c, unit);
      const int64_t at = p.sample * sample_size + p.begin;
      const A near = Moments ? A(0) : static_cast<A>(center.at(p.sample, p.row));
      const int64_t size = p.end - p.begin;
      const bool* shows = Masked ? keep + p.sample * s.spatial + p.begin % s.spatial : nullptr;
      const auto sums = sum_values<Moments, Masked, T, A>(x + at, dy + at, shows, size, near);
      if (c.pieces > 1) pieces[unit] = sums;
      else out.put(unit, sums, off(p.sample, p.row));
    }
  });
  if (c.pieces == 1) return;
  for (int64_t row = 0; row < s.samples * s.rows; ++row) {
    Sums<Moments> all;
    for (int64_t k = 0; k < c.pieces; ++k) all.add(pieces[row * c.pieces + k]);
    out.put(row, all, off(row / s.rows, row % s.rows));
  }
}

// Adds a line of values to the sums a and b of each place.
template <bool Moments, class T, class A>
NORMLAB_LOOP void add_line(const T* x, const T* dy, int64_t width, const A* pivot, A* a, A* b) {
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) {
    const A d = static_cast<A>(x[i]) - pivot[i];
    const A g = Moments ? d : static_cast<A>(dy[i]);
    a[i] += g;
    b[i] += g * d;
  }
}

// From the sums a and b of n values less pivot, what Sums has, for each place of a line.
template <bool Moments, class A>
NORMLAB_LOOP void finish_line(int64_t width, double n, const A* pivot, const A* a, const A* b, double* first,
                              double* second) {
  const double share = n > 0 ? 1 / n : 0.0;
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) {
    const double sum = a[i], square = b[i], off = sum * share, left = square - sum * off;
    first[i] = Moments ? pivot[i] + off : sum;
    second[i] = Moments ? (left < 0 ? 0.0 : left) : square;
  }
}

// Sums::add for each place of a line; `part` of all values are those of the other line.
template <bool Moments>
NORMLAB_LOOP void merge_line(int64_t width, double before, double part, const double* first, const double* second,
                             double* all_first, double* all_second) {
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) {
    const double apart = Moments ? first[i] - all_first[i] : first[i];
    all_second[i] += Moments ? second[i] + apart * apart * (before * part) : second[i];
    all_first[i] += Moments ? apart * part : apart;
  }
}

template <bool Moments, bool Masked, class T, class K>
void sum_last(const Shape& s, const T* x, const T* dy, const bool* keep, Values<K> center, int64_t threads,
              Out<Moments>& out) {
  using A = Wide<T>;
  const Cut c = cut(s);
  const int64_t channels = s.channels, fold = folded(s), width = fold * channels;
  // Of each unit, where there are several for an image: its sums, and how many values a channel has.
  std::vector<double> firsts(c.pieces > 1 ? c.units * channels : 0), seconds(firsts.size()), counts(c.units);
  const auto put = [&](int64_t image, double count, const double* first, const double* second) {
    const int64_t n = image / s.parts;
    for (int64_t k = 0; k < channels; ++k) {
      const int64_t r = k * s.parts + image % s.parts;
      const double exact = Moments ? 0.0 : center.at(n, r);
      out.put(n * s.rows + r, {count, first[k], second[k]}, static_cast<double>(static_cast<A>(exact)) - exact);
    }
  };
  share(c.units, s.samples * channels * s.spatial, threads, [&](int64_t from, int64_t to) {
    Room<A> room(3, width);
    Room<double> sums(2, channels);
    A *pivot = room[0], *a = room[1], *b = room[2];
    for (int64_t unit = from; unit < to; ++unit) {
      const Positions p(s, c, unit);
      const T *x_at = x + p.sample * s.spatial * channels, *dy_at = dy + p.sample * s.spatial * channels;
      const bool* shows = keep + p.sample * s.spatial;
      for (int64_t k = 0; k < 3; ++k) std::fill_n(room[k], width, A(0));
      if constexpr (Moments) {  // about the mean of the first positions
        A some = 0;
        for (int64_t i = p.begin; i < p.end && some < 4; ++i) {
          if (Masked && !shows[i]) continue;
          some += 1;
          for (int64_t k = 0; k < channels; ++k) pivot[k] += (static_cast<A>(x_at[i * channels + k]) - pivot[k]) / some;
        }
      } else {
        for (int64_t k = 0; k < channels; ++k) pivot[k] = static_cast<A>(center.at(p.sample, k * s.parts + p.part));
      }
      for (int64_t k = channels; k < width; ++k) pivot[k] = pivot[k - channels];
      int64_t count = 0;
      for (int64_t at = p.begin, i; at < p.end; at = i) {
        const Run<Masked> run(shows, at, p.end);
        i = run.shown ? at : run.end;
        count += run.end - i;
        for (int64_t next; i < run.end; i = next) {
          next = std::min(run.end, i + fold);
          add_line<Moments, T, A>(x_at + i * channels, dy_at + i * channels, (next - i) * channels, pivot, a, b);
        }
      }
      for (int64_t k = channels; k < width; ++k) a[k % channels] += a[k], b[k % channels] += b[k];
      const bool alone = c.pieces == 1;
      double *first = alone ? sums[0] : &firsts[unit * channels], *second = alone ? sums[1] : &seconds[unit * channels];
      counts[unit] = static_cast<double>(count);
      finish_line<Moments, A>(channels, counts[unit], pivot, a, b, first, second);
      if (alone) put(unit, counts[unit], first, second);
    }
  });
  if (c.pieces == 1) return;
  share(s.samples * s.parts, c.units * channels, threads, [&](int64_t from, int64_t to) {
    for (int64_t image = from; image < to; ++image) {
      const int64_t start = image * c.pieces;
      double all = counts[start], *first = &firsts[start * channels], *second = &seconds[start * channels];
      for (int64_t unit = start + 1; unit < start + c.pieces; ++unit) {
        if (counts[unit] == 0) continue;
        all += counts[unit];
        merge_line<Moments>(channels, all - counts[unit], counts[unit] / all, &firsts[unit * channels],
                            &seconds[unit * channels], first, second);
      }
      put(image, all, first, second);
    }
  });
}

// --- a line for each row ---------------------------------------------------------------------------------------------

// out = slope * (x - center) + shift + factor * dy, where slope is slope * weight, and shift is shift * weight + bias.
template <class K>
struct Line {
  Values<K> center, slope, shift, weight, bias, factor;
};

template <class A>
struct Numbers {
  A center, slope, shift, factor;
  template <class K>
  Numbers(const Line<K>& line, int64_t n, int64_t row, int64_t channel) {
    const double exact = line.center.at(n, row), w = line.weight.at(n, channel), steep = line.slope.at(n, row) * w;
    center = static_cast<A>(exact);
    slope = static_cast<A>(steep);
    const double off = static_cast<double>(center) - exact;
    shift = static_cast<A>(line.shift.at(n, row) * w + line.bias.at(n, channel) + off * steep);
    factor = static_cast<A>(line.factor.at(n, row));
  }
};

template <bool X, bool Dy, bool Masked, class T, class A>
NORMLAB_LOOP void draw_row(const T* x, const T* dy, T* out, const bool* keep, int64_t size, Numbers<A> at) {
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) {
    A value = at.shift;
    if constexpr (Dy) value += at.factor * static_cast<A>(dy[i]);
    if constexpr (X) value += at.slope * (static_cast<A>(x[i]) - at.center);
    if constexpr (Masked) value = kept(value, keep[i]);
    out[i] = static_cast<T>(value);
  }
}

template <bool X, bool Dy, bool Masked, class T, class K>
void draw_contiguous(const Shape& s, const T* x, const T* dy, T* out, const bool* keep, const Line<K>& line,
                     int64_t threads) {
  using A = Wide<T>;
  const Cut c = cut(s);
  const int64_t sample_size = s.channels * s.spatial;
  share(c.units, s.samples * sample_size, threads, [&](int64_t from, int64_t to) {
    for (int64_t unit = from; unit < to; ++unit) {
      const Piece p(s, c, unit);
      const Numbers<A> at(line, p.sample, p.row, p.channel);
      const int64_t start = p.sample * sample_size + p.begin;
      const int64_t size = p.end - p.begin;
      const bool* shows = Masked ? keep + p.sample * s.spatial + p.begin % s.spatial : nullptr;
      draw_row<X, Dy, Masked, T, A>(x + start, dy + start, out + start, shows, size, at);
    }
  });
}

template <bool X, bool Dy, class T, class A>
NORMLAB_LOOP void draw_line(const T* x, const T* dy, T* out, int64_t width, const A* center, const A* slope,
                            const A* shift, const A* factor) {
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) {
    A value = shift[i];
    if constexpr (Dy) value += factor[i] * static_cast<A>(dy[i]);
    if constexpr (X) value += slope[i] * (static_cast<A>(x[i]) - center[i]);
    out[i] = static_cast<T>(value);
  }
}

template <bool X, bool Dy, bool Masked, class T, class K>
void draw_last(const Shape& s, const T* x, const T* dy, T* out, const bool* keep, const Line<K>& line,
               int64_t threads) {
  using A = Wide<T>;
  const Cut c = cut(s);
  const int64_t channels = s.channels, fold = folded(s), width = fold * channels;
  share(c.units, s.samples * channels * s.spatial, threads, [&](int64_t from, int64_t to) {
    Room<A> room(4, width);
    A *center = room[0], *slope = room[1], *shift = room[2], *factor = room[3];
    int64_t image = -1;
    for (int64_t unit = from; unit < to; ++unit) {
      const Positions p(s, c, unit);
      if (image != unit / c.pieces) {
        image = unit / c.pieces;
        for (int64_t i = 0; i < width; ++i) {
          const Numbers<A> at(line, p.sample, i % channels * s.parts + p.part, i % channels);
          center[i] = at.center, slope[i] = at.slope, shift[i] = at.shift, factor[i] = at.factor;
        }
      }
      const bool* shows = keep + p.sample * s.spatial;
      for (int64_t i = p.begin; i < p.end;) {
        const Run<Masked> run(shows, i, p.end);
        for (int64_t next; i < run.end; i = next) {
          next = std::min(run.end, i + fold);
          const int64_t start = (p.sample * s.spatial + i) * channels, size = (next - i) * channels;
          if (!run.shown) std::memset(static_cast<void*>(out + start), 0, sizeof(T) * size);
          else draw_line<X, Dy, T, A>(x + start, dy + start, out + start, size, center, slope, shift, factor);
        }
      }
    }
  });
}

// --- the four passes -------------------------------------------------------------------------------------------------

template <bool Moments, class T, class K>
bool sum(const Shape& s, const T* x, const T* dy, const bool* keep, Values<K> center, int64_t threads, double* wide,
         float* narrow) {
  Out<Moments> out{wide, narrow, s.samples * s.rows};
  const auto run = s.last ? (keep != nullptr ? sum_last<Moments, true, T, K> : sum_last<Moments, false, T, K>)
                          : (keep != nullptr ? sum_contiguous<Moments, true, T, K>
                                             : sum_contiguous<Moments, false, T, K>);
  run(s, x, dy, keep, center, threads, out);
  return out.far.load();
}

template <bool X, bool Dy, class T, class K>
void draw(const Shape& s, const T* x, const T* dy, T* out, const bool* keep, const Line<K>& line, int64_t threads) {
  const auto run = s.last ? (keep != nullptr ? draw_last<X, Dy, true, T, K> : draw_last<X, Dy, false, T, K>)
                          : (keep != nullptr ? draw_contiguous<X, Dy, true, T, K>
                                             : draw_contiguous<X, Dy, false, T, K>);
  run(s, x, dy, out, keep, line, threads);
}

// Mean and biased variance of every row. Returns whether a mean is far from zero.
template <class T>
bool moments(const Shape& s, const void* x, const bool* keep, int64_t threads, double* wide, float* narrow) {
  const T* values = static_cast<const T*>(x);
  return sum<true, T, float>(s, values, values, keep, {}, threads, wide, narrow);
}

// Row sums of dy and of dy * (x - center).
template <class T, class K>
void row_sums(const Shape& s, const void* x, const void* dy, const bool* keep, const void* center, int64_t threads,
              double* wide, float* narrow) {
  sum<false, T, K>(s, static_cast<const T*>(x), static_cast<const T*>(dy), keep,
                   *static_cast<const Values<K>*>(center), threads, wide, narrow);
}

// slope * (x - center) + shift + factor * dy, and zero where the mask hides it. x or dy may be null.
template <class T, class K>
void lines(const Shape& s, const void* x, const void* dy, void* out, const bool* keep, const void* line,
           int64_t threads) {
  static const K zero = 0, one = 1;
  Line<K> given = *static_cast<const Line<K>*>(line);
  for (Values<K>* v : {&given.center, &given.slope, &given.shift, &given.weight, &given.bias, &given.factor})
    if (v->data == nullptr) *v = {v == &given.weight ? &one : &zero, 0, 0};
  const T *values = static_cast<const T*>(x), *dys = static_cast<const T*>(dy);
  T* to = static_cast<T*>(out);
  if (x == nullptr) draw<false, true, T, K>(s, dys, dys, to, keep, given, threads);
  else if (dy == nullptr) draw<true, false, T, K>(s, values, values, to, keep, given, threads);
  else draw<true, true, T, K>(s, values, dys, to, keep, given, threads);
}

}  // namespace normlab

// Each for the dtypes that are served; wide: coefficients are float64.

#define NORMLAB_EXPORT extern "C" __attribute__((visibility("default")))
#define NORMLAB_PASSES(T, NAME)                                                                                        \
  NORMLAB_EXPORT bool moments_##NAME(const normlab::Shape* s, const void* x, const bool* keep, int64_t threads,        \
                                     double* wide, float* narrow) {                                                    \
    return normlab::moments<T>(*s, x, keep, threads, wide, narrow);                                                    \
  }                                                                                                                    \
  NORMLAB_EXPORT void row_sums_##NAME(const normlab::Shape* s, const void* x, const void* dy, const bool* keep,        \
                                      const void* center, bool is_wide, int64_t threads, double* wide,                 \
                                      float* narrow) {                                                                 \
    const auto run = is_wide ? normlab::row_sums<T, double> : normlab::row_sums<T, float>;                             \
    run(*s, x, dy, keep, center, threads, wide, narrow);                                                               \
  }                                                                                                                    \
  NORMLAB_EXPORT void lines_##NAME(const normlab::Shape* s, const void* x, const void* dy, void* out,                  \
                                   const bool* keep, const void* line, bool is_wide, int64_t threads) {                \
    const auto run = is_wide ? normlab::lines<T, double> : normlab::lines<T, float>;                                   \
    run(*s, x, dy, out, keep, line, threads);                                                                          \
  }

NORMLAB_PASSES(float, float32)
NORMLAB_PASSES(double, float64)
NORMLAB_PASSES(normlab::BFloat16, bfloat16)
