// The passes over x [N, C, *S] on the CPU. Two loops serve all four: sums over rows (moments, and the sums of
// backward), and one line for each row (apply, and the gradient at x). Weighted sums of pools take one call a
// direction, with the arithmetic on rows between the passes; so does positional norm, which has loops of its own.
// native.py builds this file and calls it.
//
// float32 and bfloat16 accumulate in float32 over a few hundred values, about a value close to their mean, and in
// float64 beyond. So a mean of 1e4 beside a deviation of 1 keeps its digits. Work is cut by the shape alone, never by
// the number of threads: any number of them gives the same bits.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
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

// Where, in a channels-last sample, a row of a channel ends at a position and the next one begins.
struct Break {
  int64_t position, channel;
};

// The rows of a channels-last sample of uneven rows: the present row of each channel, as positions go by.
struct Uneven {
  std::vector<Break> breaks;
  std::vector<int64_t> row;  // of each channel
  explicit Uneven(const Shape& s) {
    for (int64_t r = 0; r < s.rows; ++r) {
      const int64_t begin = row_begin(s, r), position = begin % s.spatial;
      if (position == 0) row.push_back(r);
      else breaks.push_back({position, begin / s.spatial});
    }
    std::stable_sort(breaks.begin(), breaks.end(), [](Break a, Break b) { return a.position < b.position; });
  }
};

template <bool Moments, class T, class K>
void sum_uneven_last(const Shape& s, const T* x, const T* dy, Values<K> center, int64_t threads, Out<Moments>& out) {
  using A = Wide<T>;
  const Uneven start(s);
  const int64_t channels = s.channels, fold = folded(s), width = fold * channels;
  const int64_t most = std::max<int64_t>(64, kImage / channels);  // positions that are summed in float32
  share(s.samples, s.samples * channels * s.spatial, threads, [&](int64_t from, int64_t to) {
    Room<A> room(3, width);
    A *pivot = room[0], *a = room[1], *b = room[2];
    for (int64_t n = from; n < to; ++n) {
      const T *x_at = x + n * s.spatial * channels, *dy_at = dy + n * s.spatial * channels;
      std::vector<int64_t> row = start.row, since(channels, 0);
      std::vector<Sums<Moments>> sums(s.rows);
      const auto aim = [&](int64_t c, A value) {
        for (int64_t k = c; k < width; k += channels) pivot[k] = value;
      };
      const auto flush = [&](int64_t c, int64_t at) {
        double first = 0, second = 0;
        for (int64_t k = c; k < width; k += channels) first += a[k], second += b[k], a[k] = b[k] = 0;
        sums[row[c]].add(Sums<Moments>::about(pivot[c], static_cast<double>(at - since[c]), first, second));
        since[c] = at;
      };
      std::fill_n(a, width, A(0));
      std::fill_n(b, width, A(0));
      auto next = start.breaks.begin();
      for (int64_t at = 0; at < s.spatial;) {
        const int64_t end = std::min(s.spatial, at + most);
        for (int64_t c = 0; c < channels; ++c)
          aim(c, Moments ? static_cast<A>(x_at[at * channels + c]) : static_cast<A>(center.at(n, row[c])));
        while (at < end) {
          const int64_t stop = next == start.breaks.end() ? end : std::min(end, next->position);
          for (int64_t until; at < stop; at = until) {
            until = std::min(stop, at + fold);
            add_line<Moments, T, A>(x_at + at * channels, dy_at + at * channels, (until - at) * channels, pivot, a, b);
          }
          for (; next != start.breaks.end() && next->position == at; ++next) {
            const int64_t c = next->channel;
            flush(c, at);
            ++row[c];
            if (!Moments) aim(c, static_cast<A>(center.at(n, row[c])));
          }
        }
        for (int64_t c = 0; c < channels; ++c) flush(c, at);
      }
      for (int64_t r = 0; r < s.rows; ++r) {
        const double exact = Moments ? 0.0 : center.at(n, r);
        out.put(n * s.rows + r, sums[r], static_cast<double>(static_cast<A>(exact)) - exact);
      }
    }
  });
}

template <bool Moments, bool Masked, class T, class K>
void sum_last(const Shape& s, const T* x, const T* dy, const bool* keep, Values<K> center, int64_t threads,
              Out<Moments>& out) {
  if (s.ends != nullptr) return sum_uneven_last<Moments, T, K>(s, x, dy, center, threads, out);
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

template <bool X, bool Dy, class T, class K>
void draw_uneven_last(const Shape& s, const T* x, const T* dy, T* out, const Line<K>& line, int64_t threads) {
  using A = Wide<T>;
  const Uneven start(s);
  const int64_t channels = s.channels, fold = folded(s), width = fold * channels;
  share(s.samples, s.samples * channels * s.spatial, threads, [&](int64_t from, int64_t to) {
    Room<A> room(4, width);
    A *center = room[0], *slope = room[1], *shift = room[2], *factor = room[3];
    for (int64_t n = from; n < to; ++n) {
      std::vector<int64_t> row = start.row;
      const auto aim = [&](int64_t c) {
        const Numbers<A> at(line, n, row[c], c);
        for (int64_t k = c; k < width; k += channels)
          center[k] = at.center, slope[k] = at.slope, shift[k] = at.shift, factor[k] = at.factor;
      };
      for (int64_t c = 0; c < channels; ++c) aim(c);
      auto next = start.breaks.begin();
      for (int64_t at = 0; at < s.spatial;) {
        const int64_t stop = next == start.breaks.end() ? s.spatial : next->position;
        for (int64_t until; at < stop; at = until) {
          until = std::min(stop, at + fold);
          const int64_t place = (n * s.spatial + at) * channels, size = (until - at) * channels;
          draw_line<X, Dy, T, A>(x + place, dy + place, out + place, size, center, slope, shift, factor);
        }
        for (; next != start.breaks.end() && next->position == at; ++next) {
          ++row[next->channel];
          aim(next->channel);
        }
      }
    }
  });
}

template <bool X, bool Dy, bool Masked, class T, class K>
void draw_last(const Shape& s, const T* x, const T* dy, T* out, const bool* keep, const Line<K>& line,
               int64_t threads) {
  if (s.ends != nullptr) return draw_uneven_last<X, Dy, T, K>(s, x, dy, out, line, threads);
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
void sum(const Shape& s, const T* x, const T* dy, const bool* keep, Values<K> center, int64_t threads,
         Out<Moments>& out) {
  const auto run = s.last ? (keep != nullptr ? sum_last<Moments, true, T, K> : sum_last<Moments, false, T, K>)
                          : (keep != nullptr ? sum_contiguous<Moments, true, T, K>
                                             : sum_contiguous<Moments, false, T, K>);
  run(s, x, dy, keep, center, threads, out);
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
  Out<true> out{wide, narrow, s.samples * s.rows};
  sum<true, T, float>(s, values, values, keep, {}, threads, out);
  return out.far.load();
}

// Row sums of dy and of dy * (x - center).
template <class T, class K>
void row_sums(const Shape& s, const void* x, const void* dy, const bool* keep, const void* center, int64_t threads,
              double* wide, float* narrow) {
  Out<false> out{wide, narrow, s.samples * s.rows};
  sum<false, T, K>(s, static_cast<const T*>(x), static_cast<const T*>(dy), keep,
                   *static_cast<const Values<K>*>(center), threads, out);
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

// --- weighted sums of pools, whole -----------------------------------------------------------------------------------

// A pool, as cells [segments, groups] of rows.
struct Pool {
  int64_t groups, segments;
  const int64_t* ends;     // the row at which each group ends, where they differ; or null
  const int64_t* segment;  // of each sample; null: `ghost` samples that follow each other make one
  int64_t ghost, over_batch;
  double* seen;              // for mean and variance of each cell; may be null
  Values<double> mean, var;  // running statistics of each row; null where the batch's are taken
  bool live() const { return mean.data == nullptr; }
  int64_t cells() const { return segments * groups; }
  int64_t first(int64_t n) const { return (segment != nullptr ? segment[n] : n / ghost) * groups; }
  int64_t group(int64_t row, int64_t rows) const {
    return ends != nullptr ? std::upper_bound(ends, ends + groups, row) - ends : row / (rows / groups);
  }
  int64_t end(int64_t g, int64_t rows) const { return ends != nullptr ? ends[g] : (g + 1) * (rows / groups); }
};

// A weight or a bias as Python has it, [1 or N, C]; data may be null.
struct Affine {
  const void* data;
  int64_t samples, by_sample, by_channel, size;  // size: of a number, in bytes
};

using Doubles = std::vector<double>;

inline Doubles read(const Affine& t, int64_t channels) {  // none where there is none
  if (t.data == nullptr) return {};
  Doubles found(t.samples * channels);
  const auto fill = [&](const auto* from) {
    for (int64_t n = 0, i = 0; n < t.samples; ++n)
      for (int64_t c = 0; c < channels; ++c, ++i) found[i] = from[n * t.by_sample + c * t.by_channel];
  };
  if (t.size == 8) fill(static_cast<const double*>(t.data));
  else if (t.size == 4) fill(static_cast<const float*>(t.data));
  else fill(static_cast<const BFloat16*>(t.data));
  return found;
}

// Writes numbers of so many bytes.
inline void write(const Doubles& values, int64_t size, void* to) {
  if (size == 8) std::copy(values.begin(), values.end(), static_cast<double*>(to));
  else if (size == 4) std::copy(values.begin(), values.end(), static_cast<float*>(to));
  else std::transform(values.begin(), values.end(), static_cast<BFloat16*>(to),
                      [](double v) { return BFloat16(static_cast<float>(v)); });
}

struct Mixture {
  Shape shape;
  int64_t number;
  const Pool* pools;
  int64_t sets;           // of weights of pools: each is of as many rows
  double eps;
  const double* shares;   // [2, number, sets], of means and of variances; null: one pool
  const bool* keep;       // the mask
  const int64_t* counts;  // how many positions of each sample it shows
  Affine weight, bias;
};

// Some rows of some samples. If no pool goes beyond it, all is done while the cache still has it.
struct Block {
  int64_t sample, samples, begin, end;
};

// Calls body(cell, begin, end) for the rows of a sample that share a cell.
template <class F>
inline void by_cell(const Pool& p, int64_t rows, int64_t n, int64_t begin, int64_t end, F&& body) {
  for (int64_t g = p.group(begin, rows), stop; begin < end; ++g, begin = stop) {
    stop = std::min(end, p.end(g, rows));
    body(p.first(n) + g, begin, stop);
  }
}

// Calls body(row, cell) for some rows of a sample.
template <class F>
inline void spread(const Pool& p, int64_t rows, int64_t n, int64_t begin, int64_t end, F&& body) {
  if (p.groups != rows) {
    by_cell(p, rows, n, begin, end, [&](int64_t cell, int64_t from, int64_t to) {
#pragma omp simd
      for (int64_t r = from; r < to; ++r) body(r, cell);
    });
    return;
  }
  const int64_t first = p.first(n);
#pragma omp simd
  for (int64_t r = begin; r < end; ++r) body(r, first + r);
}

// Adds value(row) of some rows of a sample to their cells.
template <class F>
inline void gather(const Pool& p, int64_t rows, int64_t n, int64_t begin, int64_t end, double* cells, F&& value) {
  if (p.groups != rows) {
    by_cell(p, rows, n, begin, end, [&](int64_t cell, int64_t from, int64_t to) {
      double sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t r = from; r < to; ++r) sum += value(r);
      cells[cell] += sum;
    });
    return;
  }
  double* own = cells + p.first(n);
#pragma omp simd
  for (int64_t r = begin; r < end; ++r) own[r] += value(r);
}

// The arithmetic between the passes, all of it in float64.
struct Between {
  const Mixture& m;
  const int64_t samples, rows, channels;
  const double *means, *vars;              // of rows
  std::vector<Doubles> mean, var, values;  // of the cells of each pool
  Doubles center, scale, weight, bias, sizes;
  std::vector<int64_t> channel;  // of each row, where rows are not channels

  Between(const Mixture& m, const double* means)
      : m(m), samples(m.shape.samples), rows(m.shape.rows), channels(m.shape.channels), means(means),
        vars(means + samples * rows), mean(m.number), var(m.number), values(m.number), center(samples * rows),
        scale(samples * rows), weight(read(m.weight, channels)), bias(read(m.bias, channels)), sizes(rows) {
    for (int64_t k = 0; k < m.number; ++k)
      for (Doubles* each : {&mean[k], &var[k], &values[k]}) each->resize(m.pools[k].live() ? m.pools[k].cells() : 0);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t begin = row_begin(m.shape, r);
      sizes[r] = m.counts != nullptr ? 1.0 : static_cast<double>(row_begin(m.shape, r + 1) - begin);
      if (rows != channels) channel.push_back(m.shape.ends != nullptr ? begin / m.shape.spatial : r / m.shape.parts);
    }
  }

  // Calls body(begin, end, set) for the rows of a block by the set of weights that they have.
  template <class F>
  void by_set(const Block& b, F&& body) const {
    const int64_t width = rows / m.sets;
    for (int64_t begin = b.begin, end; begin < b.end; begin = end) {
      end = m.sets == 1 ? b.end : std::min(b.end, (begin / width + 1) * width);
      body(begin, end, begin / width);
    }
  }

  double share(int64_t which, int64_t k, int64_t set) const {
    return m.shares == nullptr ? 1.0 : m.shares[(which * m.number + k) * m.sets + set];
  }

  // Calls body(row, value) with a statistic of a pool: of its cells, or a running one.
  template <class F>
  void statistic(const Pool& p, const Doubles& cells, const Values<double>& running, int64_t n, int64_t begin,
                 int64_t end, F&& body) const {
    const double* t = cells.data();
    if (p.live()) return spread(p, rows, n, begin, end, [=](int64_t r, int64_t cell) { body(r, t[cell]); });
    for (int64_t r = begin; r < end; ++r) body(r, running.at(n, r));
  }

  // Calls body(cell) for the cells that a block has of a pool.
  template <class F>
  void cells(const Pool& p, const Block& b, F&& body) const {
    const bool whole = b.samples == samples && b.end - b.begin == rows;
    const int64_t from = whole ? 0 : p.first(b.sample) + p.group(b.begin, rows);
    const int64_t to = whole ? p.cells() : p.first(b.sample) + p.group(b.end - 1, rows) + 1;
#pragma omp simd
    for (int64_t i = from; i < to; ++i) body(i);
  }

  void measure(int64_t k, const Block& b) {
    const Pool& p = m.pools[k];
    double *pm = mean[k].data(), *pv = var[k].data(), *pn = values[k].data();
    const double* size = sizes.data();
    for (int64_t n = b.sample; n < b.sample + b.samples; ++n) {
      const double *t = means + n * rows, shown = m.counts != nullptr ? static_cast<double>(m.counts[n]) : 1.0;
      gather(p, rows, n, b.begin, b.end, pm, [=](int64_t r) { return shown * size[r] * t[r]; });
      gather(p, rows, n, b.begin, b.end, pn, [=](int64_t r) { return shown * size[r]; });
    }
    cells(p, b, [=](int64_t i) { pm[i] /= pn[i] > 0 ? pn[i] : 1; });
    for (int64_t n = b.sample; n < b.sample + b.samples; ++n) {
      const double *t = means + n * rows, *v = vars + n * rows;
      const double shown = m.counts != nullptr ? static_cast<double>(m.counts[n]) : 1.0;
      double* second = &scale[n * rows];  // which has no values yet
      spread(p, rows, n, b.begin, b.end, [=](int64_t r, int64_t cell) {
        const double apart = t[r] - pm[cell];
        second[r] = shown * size[r] * (v[r] + apart * apart);
      });
      gather(p, rows, n, b.begin, b.end, pv, [=](int64_t r) { return second[r]; });
    }
    cells(p, b, [=](int64_t i) { pv[i] = pn[i] > 0 ? pv[i] / pn[i] : 1; });
  }

  // Statistics of the pools, and from them center and scale of each row.
  void standardize(const Block& b) {
    for (int64_t k = 0; k < m.number; ++k)
      if (m.pools[k].live()) measure(k, b);
    for (int64_t n = b.sample; n < b.sample + b.samples; ++n) {
      double *c = &center[n * rows], *s = &scale[n * rows];
      std::fill(s + b.begin, s + b.end, 0.0);
      by_set(b, [&](int64_t begin, int64_t end, int64_t set) {
        for (int64_t k = 0; k < m.number; ++k) {  // a pool of weight zero leaves no trace, infinite or not
          const Pool& p = m.pools[k];
          const double w = share(0, k, set), u = share(1, k, set);
          if (w != 0) statistic(p, mean[k], p.mean, n, begin, end, [=](int64_t r, double t) { c[r] += w * t; });
          if (u != 0) statistic(p, var[k], p.var, n, begin, end, [=](int64_t r, double t) { s[r] += u * t; });
        }
      });
      const double eps = m.eps;
#pragma omp simd
      for (int64_t r = b.begin; r < b.end; ++r) s[r] = 1 / std::sqrt(s[r] + eps);
    }
  }

  // The weight of each row of a sample; `room` is for those that have to be looked up.
  const double* weights(int64_t n, Doubles& room) const {
    if (weight.empty()) {
      room.assign(rows, 1.0);
      return room.data();
    }
    const double* own = weight.data() + (m.weight.samples > 1 ? n * channels : 0);
    if (channel.empty()) return own;
    room.resize(rows);
    for (int64_t r = 0; r < rows; ++r) room[r] = own[channel[r]];
    return room.data();
  }
};

// What backward has of each row.
struct Gradients {
  Doubles sums, at_center, at_var, offset, slope, factor;  // sums: of dy, then of dy * (x - center)
  double *total, *dot;
  explicit Gradients(int64_t all)
      : sums(2 * all), at_center(all), at_var(all), offset(all), slope(all), factor(all), total(sums.data()),
        dot(total + all) {}
};

// From the sums of dy and of dy * (x - center) to offset, slope and factor of dx.
inline void differentiate(const Between& w, const Block& b, Gradients& g) {
  const Mixture& m = w.m;
  const int64_t rows = w.rows;
  Doubles room;
  for (int64_t n = b.sample; n < b.sample + b.samples; ++n) {
    const double *v = w.weights(n, room), *s = &w.scale[n * rows], *total = g.total + n * rows, *dot = g.dot + n * rows;
    double *at_center = &g.at_center[n * rows], *at_var = &g.at_var[n * rows], *factor = &g.factor[n * rows];
#pragma omp simd
    for (int64_t r = b.begin; r < b.end; ++r) {
      factor[r] = s[r] * v[r];
      at_center[r] = -total[r] * factor[r];
      at_var[r] = dot[r] * v[r] * s[r] * s[r] * s[r] * -0.5;
    }
  }
  for (int64_t k = 0; k < m.number; ++k) {
    const Pool& p = m.pools[k];
    if (!p.live()) continue;
    const int64_t base = b.samples == w.samples ? 0 : p.first(b.sample);
    Doubles first(b.samples == w.samples ? p.cells() : p.groups), second(first.size());
    double *sum = first.data() - base, *square = second.data() - base;
    const double *pm = w.mean[k].data(), *values = w.values[k].data();
    for (int64_t n = b.sample; n < b.sample + b.samples; ++n)
      w.by_set(b, [&](int64_t begin, int64_t end, int64_t set) {
        const double share = w.share(0, k, set), also = w.share(1, k, set);
        const double *at_center = &g.at_center[n * rows], *at_var = &g.at_var[n * rows];
        gather(p, rows, n, begin, end, sum, [=](int64_t r) { return share * at_center[r]; });
        gather(p, rows, n, begin, end, square, [=](int64_t r) { return also * at_var[r]; });
      });
    w.cells(p, b, [=](int64_t i) {
      const double number = values[i] > 1 ? values[i] : 1;
      sum[i] /= number, square[i] *= 2 / number;
    });
    for (int64_t n = b.sample; n < b.sample + b.samples; ++n) {
      const double* t = w.means + n * rows;
      double *offset = &g.offset[n * rows], *slope = &g.slope[n * rows];
      spread(p, rows, n, b.begin, b.end, [=](int64_t r, int64_t cell) {
        offset[r] += sum[cell] + (t[r] - pm[cell]) * square[cell];
        slope[r] += square[cell];
      });
    }
  }
}

// Gradients at the weights of pools, [2, number, sets].
inline void differentiate_shares(const Between& w, const Gradients& g, double* d_shares) {
  const Mixture& m = w.m;
  Doubles room(w.rows);
  double* t = room.data();
  std::fill_n(d_shares, 2 * m.number * m.sets, 0.0);
  for (int64_t n = 0; n < w.samples; ++n)
    w.by_set({n, 1, 0, w.rows}, [&](int64_t begin, int64_t end, int64_t set) {
      for (int64_t k = 0; k < m.number; ++k)
        for (const bool of_var : {false, true}) {
          const Pool& p = m.pools[k];
          const double* d = (of_var ? g.at_var : g.at_center).data() + n * w.rows;
          w.statistic(p, (of_var ? w.var : w.mean)[k], of_var ? p.var : p.mean, n, begin, end,
                      [=](int64_t r, double value) { t[r] = value; });
          double sum = 0;
#pragma omp simd reduction(+ : sum)
          for (int64_t r = begin; r < end; ++r) sum += d[r] * t[r];
          d_shares[(of_var * m.number + k) * m.sets + set] += sum;
        }
    });
}

// Gradients at a weight or a bias, dense [1 or N, C] of its dtype.
inline void differentiate_affine(const Between& w, const Affine& of, const double* sums, bool scaled, void* to) {
  if (to == nullptr) return;
  Doubles found(of.samples * w.channels);
  for (int64_t n = 0; n < w.samples; ++n) {
    const double *sum = sums + n * w.rows, *s = &w.scale[n * w.rows];
    double* d = found.data() + (of.samples > 1 ? n * w.channels : 0);
    if (w.channel.empty()) {
#pragma omp simd
      for (int64_t c = 0; c < w.channels; ++c) d[c] += scaled ? sum[c] * s[c] : sum[c];
    } else {
      for (int64_t r = 0; r < w.rows; ++r) d[w.channel[r]] += scaled ? sum[r] * s[r] : sum[r];
    }
  }
  write(found, of.size, to);
}

// A block as a shape of its own, and where it begins: in x, in the mask, among rows [N, R], among channels [N, C].
struct Part {
  Shape shape;
  int64_t x, keep, row, channel;
  Part(const Shape& s, const Block& b)
      : shape(s), x(0), keep(b.sample * s.spatial), row(b.sample * s.rows + b.begin), channel(b.begin / s.parts) {
    shape.samples = b.samples;
    if (b.end - b.begin != s.rows) shape.rows = b.end - b.begin, shape.channels = shape.rows / s.parts;
    x = (b.sample * s.channels + channel) * s.spatial;
  }
  Values<double> values(const double* t) const { return {t + row, shape.rows, 1}; }
  Values<double> affine(const Affine& given, const Doubles& t, const double* none, const Block& b) const {
    if (t.empty()) return {none, 0, 0};
    const int64_t channels = static_cast<int64_t>(t.size()) / given.samples, by = given.samples > 1 ? channels : 0;
    return {t.data() + b.sample * by + channel, by, 1};
  }
};

constexpr int64_t kTogether = 1 << 15;  // values of a block, if groups are as small

// Calls work(block, threads) for blocks that no pool goes beyond. Their number follows from the shape alone.
template <class F>
void by_block(const Mixture& m, int64_t threads, F&& work) {
  const Shape& s = m.shape;
  int64_t groups = s.last || s.ends != nullptr ? 1 : s.channels;
  for (int64_t k = 0; k < m.number; ++k) {
    const Pool& p = m.pools[k];
    if (p.live() && p.over_batch) return work(Block{0, s.samples, 0, s.rows}, threads);
    if (p.live()) groups = p.ends != nullptr ? 1 : std::gcd(groups, p.groups);
  }
  const int64_t values = s.channels * s.spatial, least = std::max<int64_t>(1, groups * kTogether / values);
  const int64_t together = std::min(groups, least), blocks = (groups + together - 1) / together, rows = s.rows / groups;
  const auto one = [&](int64_t u, int64_t own) {
    const int64_t g = u % blocks * together;
    work(Block{u / blocks, 1, g * rows, std::min(groups, g + together) * rows}, own);
  };
  const int64_t all = s.samples * blocks;
  if (all % threads != 0 && all < 4 * threads)
    for (int64_t u = 0; u < all; ++u) one(u, threads);
  else
    share(all, s.samples * values, threads, [&](int64_t from, int64_t to) {
      for (int64_t u = from; u < to; ++u) one(u, 1);
    });
}

// y, and the moments of rows for backward: in float64 and float32. Returns whether a mean is far from zero.
template <class T>
bool forward(const Mixture& m, const T* x, T* y, double* wide, float* narrow, int64_t threads) {
  const int64_t all = m.shape.samples * m.shape.rows;
  const double zero = 0, one = 1;
  std::atomic<bool> far{false};
  Between w(m, wide);
  by_block(m, threads, [&](const Block& b, int64_t threads) {
    const Part part(m.shape, b);
    const bool* keep = m.keep == nullptr ? nullptr : m.keep + part.keep;
    Out<true> out{wide + part.row, narrow == nullptr ? nullptr : narrow + part.row, all};
    sum<true, T, float>(part.shape, x + part.x, x + part.x, keep, {}, threads, out);
    if (out.far.load()) far.store(true, std::memory_order_relaxed);
    w.standardize(b);
    const Values<double> weight = part.affine(m.weight, w.weight, &one, b);
    const Values<double> bias = part.affine(m.bias, w.bias, &zero, b);
    const Line<double> line{part.values(w.center.data()), part.values(w.scale.data()), {&zero, 0, 0}, weight, bias,
                            {&zero, 0, 0}};
    draw<true, false, T, double>(part.shape, x + part.x, x + part.x, y + part.x, keep, line, threads);
  });
  for (int64_t k = 0; k < m.number; ++k)
    if (const Pool& p = m.pools[k]; p.seen != nullptr) {
      std::copy(w.mean[k].begin(), w.mean[k].end(), p.seen);
      std::copy(w.var[k].begin(), w.var[k].end(), p.seen + p.cells());
    }
  return far.load();
}

// Gradients. `dx`, those of the affine map and `d_shares` may be null.
template <class T>
void backward(const Mixture& m, const T* x, const T* dy, const double* stats, T* dx, void* d_weight, void* d_bias,
              double* d_shares, int64_t threads) {
  const int64_t all = m.shape.samples * m.shape.rows;
  const double zero = 0, one = 1;
  Between w(m, stats);
  Gradients g(all);
  by_block(m, threads, [&](const Block& b, int64_t threads) {
    const Part part(m.shape, b);
    const bool* keep = m.keep == nullptr ? nullptr : m.keep + part.keep;
    w.standardize(b);
    Out<false> out{g.total + part.row, nullptr, all};
    sum<false, T, double>(part.shape, x + part.x, dy + part.x, keep, part.values(w.center.data()), threads, out);
    differentiate(w, b, g);
    if (dx == nullptr) return;
    const Line<double> line{part.values(stats), part.values(g.slope.data()), part.values(g.offset.data()),
                            {&one, 0, 0}, {&zero, 0, 0}, part.values(g.factor.data())};
    draw<true, true, T, double>(part.shape, x + part.x, dy + part.x, dx + part.x, keep, line, threads);
  });
  differentiate_affine(w, m.weight, g.dot, true, d_weight);
  differentiate_affine(w, m.bias, g.total, false, d_bias);
  if (d_shares != nullptr) differentiate_shares(w, g, d_shares);
}

// Moves running statistics towards those of a batch. Without a momentum they are the average of all batches.
inline void move_running(float* mean, float* var, int64_t* batches, const double* seen_mean, const double* seen_var,
                         int64_t groups, double momentum, double unbiased, bool total, bool last) {
  const double share = momentum < 0 ? 1 / static_cast<double>(*batches + 1) : momentum;
  for (int64_t g = 0; g < groups; ++g) {
    const double apart = seen_mean[g] - mean[g], drift = total ? (1 - share) * apart * apart : 0.0;
    mean[g] = static_cast<float>(mean[g] + share * apart);
    var[g] = static_cast<float>(var[g] + share * (seen_var[g] * unbiased + drift - var[g]));
  }
  *batches += last;
}

// --- positional norm -------------------------------------------------------------------------------------------------

// Each position is standardized over its channels, about their mean or about zero.
struct ByPosition {
  Shape shape;
  double eps;
  int64_t centered;
  const bool* keep;  // the mask
  Affine weight, bias;
};

constexpr int64_t kColumns = 1 << 18;  // values of x that go through all steps together, in contiguous inputs
constexpr int64_t kUnits = 64;         // of work, if samples are fewer

// How positions are cut: those of a sample that one thread takes, and of those how many at a time.
struct Tiles {
  int64_t pieces, width;
  explicit Tiles(const Shape& s) {
    width = s.last ? 1 : std::clamp<int64_t>(kColumns / s.channels / 16 * 16, 32, 4096);
    const int64_t most = std::max<int64_t>(1, s.spatial * s.channels / kImage);
    pieces = std::min({most, (kUnits + s.samples - 1) / s.samples, (s.spatial + width - 1) / width});
  }
};

// A weight or bias of each sample in the type of the loops; ones or zeros where there is none.
template <class A>
struct Channels {
  std::vector<A> values;
  int64_t by_sample;
  Channels(const Affine& t, int64_t channels, A none)
      : values(channels, none), by_sample(t.samples > 1 ? channels : 0) {
    if (t.data == nullptr) return;
    const Doubles found = read(t, channels);
    values.assign(found.begin(), found.end());
  }
  const A* of(int64_t n) const { return values.data() + n * by_sample; }
};

// What standardizes: from the mean and the mean square about it.
template <class A>
struct Standard {
  A center, scale;
  Standard(bool centered, double eps, double mean, double var) {
    center = static_cast<A>(centered ? mean : 0.0);
    scale = static_cast<A>(1 / std::sqrt((centered ? var : var + mean * mean) + eps));
  }
};

// Of one position, whose channels follow each other.
template <class T, class A>
inline Standard<A> standard_of(const ByPosition& p, const T* x) {
  const auto sums = sum_values<true, false, T, A>(x, x, nullptr, p.shape.channels, A(0));
  return {p.centered != 0, p.eps, sums.first, sums.second / sums.count};
}

// Of `width` positions, whose channels are lines: into `center` and `scale`.
template <class T, class A>
void standards_of(const ByPosition& p, const T* x, int64_t width, Room<A>& lines, Room<double>& sums, A* center,
                  A* scale) {
  const int64_t channels = p.shape.channels;
  A *pivot = lines[0], *a = lines[1], *b = lines[2];
  double *first = sums[0], *second = sums[1], *mean = sums[2], *square = sums[3];
  for (int64_t i = 0; i < width; ++i) pivot[i] = static_cast<A>(x[i]);
  for (int64_t c = 0; c < channels;) {
    const int64_t end = std::min(channels, c + kBlock), begin = c;
    std::fill_n(a, width, A(0));
    std::fill_n(b, width, A(0));
    for (; c < end; ++c) add_line<true, T, A>(x + c * p.shape.spatial, x, width, pivot, a, b);
    const auto n = static_cast<double>(end - begin), all = static_cast<double>(end);
    finish_line<true, A>(width, n, pivot, a, b, begin == 0 ? mean : first, begin == 0 ? square : second);
    if (begin != 0) merge_line<true>(width, static_cast<double>(begin), n / all, first, second, mean, square);
  }
  const double share = 1 / static_cast<double>(channels), eps = p.eps;
  const bool centered = p.centered != 0;
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) {
    const double var = square[i] * share;
    center[i] = static_cast<A>(centered ? mean[i] : 0.0);
    scale[i] = static_cast<A>(1 / std::sqrt((centered ? var : var + mean[i] * mean[i]) + eps));
  }
}

// Calls work(sample, begin, end, unit) for pieces of samples.
template <class F>
void by_piece(const Shape& s, const Tiles& tiles, int64_t threads, F&& work) {
  share(s.samples * tiles.pieces, s.samples * s.channels * s.spatial, threads, [&](int64_t from, int64_t to) {
    for (int64_t u = from; u < to; ++u) {
      const int64_t k = u % tiles.pieces;
      work(u / tiles.pieces, s.spatial * k / tiles.pieces, s.spatial * (k + 1) / tiles.pieces, u);
    }
  });
}

// y of one position.
template <class T, class A>
NORMLAB_LOOP void draw_position(const T* x, T* y, int64_t size, Standard<A> at, const A* weight, const A* bias) {
#pragma omp simd
  for (int64_t c = 0; c < size; ++c)
    y[c] = static_cast<T>((static_cast<A>(x[c]) - at.center) * at.scale * weight[c] + bias[c]);
}

// y of one channel at some positions.
template <bool Masked, class T, class A>
NORMLAB_LOOP void draw_channel(const T* x, T* y, const bool* keep, int64_t size, const A* center, const A* scale,
                               A weight, A bias) {
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) {
    A value = (static_cast<A>(x[i]) - center[i]) * (scale[i] * weight) + bias;
    if constexpr (Masked) value = kept(value, keep[i]);
    y[i] = static_cast<T>(value);
  }
}

template <bool Masked, class T>
void positions(const ByPosition& p, const T* x, T* y, int64_t threads) {
  using A = Wide<T>;
  const Shape& s = p.shape;
  const Tiles tiles(s);
  const Channels<A> weight(p.weight, s.channels, A(1)), bias(p.bias, s.channels, A(0));
  by_piece(s, tiles, threads, [&](int64_t n, int64_t begin, int64_t end, int64_t) {
    const int64_t from = n * s.channels * s.spatial;
    const bool* keep = p.keep + n * s.spatial;
    if (s.last) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t at = from + i * s.channels;
        if (Masked && !keep[i]) std::memset(static_cast<void*>(y + at), 0, sizeof(T) * s.channels);
        else draw_position<T, A>(x + at, y + at, s.channels, standard_of<T, A>(p, x + at), weight.of(n), bias.of(n));
      }
      return;
    }
    Room<A> lines(5, tiles.width);
    Room<double> sums(4, tiles.width);
    A *center = lines[3], *scale = lines[4];
    for (int64_t i = begin, width; i < end; i += width) {
      width = std::min(tiles.width, end - i);
      standards_of<T, A>(p, x + from + i, width, lines, sums, center, scale);
      for (int64_t c = 0; c < s.channels; ++c) {
        const int64_t at = from + c * s.spatial + i;
        draw_channel<Masked, T, A>(x + at, y + at, keep + i, width, center, scale, weight.of(n)[c], bias.of(n)[c]);
      }
    }
  });
}

struct Two {
  double a, b;
};

// What backward sums: over channels at a position, g = weight * dy and g * standardized; and of each channel over
// positions, dy * standardized and dy.
template <class T, class A>
NORMLAB_LOOP Two sum_position(const T* x, const T* dy, int64_t size, Standard<A> at, const A* weight, A* d_weight,
                              A* d_bias) {
  A first = 0, second = 0;
#pragma omp simd reduction(+ : first, second)
  for (int64_t c = 0; c < size; ++c) {
    const A d = static_cast<A>(dy[c]), standard = (static_cast<A>(x[c]) - at.center) * at.scale, g = d * weight[c];
    first += g;
    second += g * standard;
    d_weight[c] += d * standard;
    d_bias[c] += d;
  }
  return {first, second};
}

template <bool Masked, class T, class A>
NORMLAB_LOOP Two sum_channel(const T* x, const T* dy, const bool* keep, int64_t size, const A* center, const A* scale,
                             A weight, A* first, A* second) {
  A d_weight = 0, d_bias = 0;
#pragma omp simd reduction(+ : d_weight, d_bias)
  for (int64_t i = 0; i < size; ++i) {
    A d = static_cast<A>(dy[i]), standard = (static_cast<A>(x[i]) - center[i]) * scale[i];
    if constexpr (Masked) d = kept(d, keep[i]), standard = kept(standard, keep[i]);
    first[i] += d * weight;
    second[i] += d * weight * standard;
    d_weight += d * standard;
    d_bias += d;
  }
  return {d_weight, d_bias};
}

// dx = scale * (weight * dy - mean of g - standardized * mean of g * standardized)
template <class T, class A>
NORMLAB_LOOP void back_position(const T* x, const T* dy, T* dx, int64_t size, Standard<A> at, const A* weight, A offset,
                                A slope) {
#pragma omp simd
  for (int64_t c = 0; c < size; ++c)
    dx[c] = static_cast<T>(at.scale * weight[c] * static_cast<A>(dy[c]) - offset -
                           slope * (static_cast<A>(x[c]) - at.center));
}

template <bool Masked, class T, class A>
NORMLAB_LOOP void back_channel(const T* x, const T* dy, T* dx, const bool* keep, int64_t size, const A* center,
                               const A* scale, A weight, const A* offset, const A* slope) {
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) {
    A value = scale[i] * weight * static_cast<A>(dy[i]) - offset[i] - slope[i] * (static_cast<A>(x[i]) - center[i]);
    if constexpr (Masked) value = kept(value, keep[i]);
    dx[i] = static_cast<T>(value);
  }
}

// dx, and the gradients of weight and bias; each may be null.
template <bool Masked, class T>
void positions_back(const ByPosition& p, const T* x, const T* dy, T* dx, void* d_weight, void* d_bias,
                    int64_t threads) {
  using A = Wide<T>;
  const Shape& s = p.shape;
  const Tiles tiles(s);
  const Channels<A> weight(p.weight, s.channels, A(1));
  const int64_t channels = s.channels;
  Doubles of_weight(s.samples * tiles.pieces * channels), of_bias(of_weight.size());  // of each unit
  by_piece(s, tiles, threads, [&](int64_t n, int64_t begin, int64_t end, int64_t unit) {
    const int64_t from = n * channels * s.spatial;
    const bool* keep = p.keep + n * s.spatial;
    const A* w = weight.of(n);
    double *dw = &of_weight[unit * channels], *db = &of_bias[unit * channels];
    const auto share = 1 / static_cast<A>(channels);
    if (s.last) {
      Room<A> lines(2, channels);
      A *near_dw = lines[0], *near_db = lines[1];
      for (int64_t i = begin; i < end;) {
        std::fill_n(near_dw, channels, A(0));
        std::fill_n(near_db, channels, A(0));
        for (const int64_t stop = std::min(end, i + kBlock); i < stop; ++i) {
          const int64_t at = from + i * channels;
          if (Masked && !keep[i]) {
            if (dx != nullptr) std::memset(static_cast<void*>(dx + at), 0, sizeof(T) * channels);
            continue;
          }
          const Standard<A> standard = standard_of<T, A>(p, x + at);
          const Two sums = sum_position<T, A>(x + at, dy + at, channels, standard, w, near_dw, near_db);
          const A offset = p.centered != 0 ? standard.scale * static_cast<A>(sums.a) * share : A(0);
          const A slope = standard.scale * standard.scale * static_cast<A>(sums.b) * share;
          if (dx != nullptr) back_position<T, A>(x + at, dy + at, dx + at, channels, standard, w, offset, slope);
        }
        for (int64_t c = 0; c < channels; ++c) dw[c] += near_dw[c], db[c] += near_db[c];
      }
      return;
    }
    Room<A> lines(7, tiles.width);
    Room<double> sums(4, tiles.width);
    A *center = lines[3], *scale = lines[4], *first = lines[5], *second = lines[6];
    for (int64_t i = begin, width; i < end; i += width) {
      width = std::min(tiles.width, end - i);
      standards_of<T, A>(p, x + from + i, width, lines, sums, center, scale);
      std::fill_n(sums[0], width, 0.0);
      std::fill_n(sums[1], width, 0.0);
      for (int64_t c = 0; c < channels;) {
        std::fill_n(first, width, A(0));
        std::fill_n(second, width, A(0));
        for (const int64_t stop = std::min(channels, c + kBlock); c < stop; ++c) {
          const int64_t at = from + c * s.spatial + i;
          const Two of =
              sum_channel<Masked, T, A>(x + at, dy + at, keep + i, width, center, scale, w[c], first, second);
          dw[c] += of.a, db[c] += of.b;
        }
        for (int64_t k = 0; k < width; ++k) sums[0][k] += first[k], sums[1][k] += second[k];
      }
      for (int64_t k = 0; k < width; ++k) {
        first[k] = p.centered != 0 ? scale[k] * static_cast<A>(sums[0][k]) * share : A(0);
        second[k] = scale[k] * scale[k] * static_cast<A>(sums[1][k]) * share;
      }
      for (int64_t c = 0; dx != nullptr && c < channels; ++c) {
        const int64_t at = from + c * s.spatial + i;
        back_channel<Masked, T, A>(x + at, dy + at, dx + at, keep + i, width, center, scale, w[c], first, second);
      }
    }
  });
  const auto gather = [&](const Affine& of, const Doubles& units, void* to) {
    if (to == nullptr) return;
    Doubles found(of.samples * channels);
    for (int64_t u = 0; u < s.samples * tiles.pieces; ++u) {
      double* d = found.data() + (of.samples > 1 ? u / tiles.pieces * channels : 0);
      for (int64_t c = 0; c < channels; ++c) d[c] += units[u * channels + c];
    }
    write(found, of.size, to);
  };
  gather(p.weight, of_weight, d_weight);
  gather(p.bias, of_bias, d_bias);
}

}  // namespace normlab

// Each for the dtypes that are served; wide: coefficients are float64.

#define NORMLAB_EXPORT extern "C" __attribute__((visibility("default")))
NORMLAB_EXPORT void move_running(float* mean, float* var, int64_t* batches, const double* seen_mean,
                                 const double* seen_var, int64_t groups, double momentum, double unbiased, bool total,
                                 bool last) {
  normlab::move_running(mean, var, batches, seen_mean, seen_var, groups, momentum, unbiased, total, last);
}

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
  }                                                                                                                    \
  NORMLAB_EXPORT bool forward_##NAME(const normlab::Mixture* m, const void* x, void* y, double* wide, float* narrow,   \
                                     int64_t threads) {                                                                \
    return normlab::forward(*m, static_cast<const T*>(x), static_cast<T*>(y), wide, narrow, threads);                  \
  }                                                                                                                    \
  NORMLAB_EXPORT void backward_##NAME(const normlab::Mixture* m, const void* x, const void* dy, const double* stats,   \
                                      void* dx, void* d_weight, void* d_bias, double* d_shares, int64_t threads) {     \
    normlab::backward(*m, static_cast<const T*>(x), static_cast<const T*>(dy), stats, static_cast<T*>(dx), d_weight,   \
                      d_bias, d_shares, threads);                                                                      \
  }                                                                                                                    \
  NORMLAB_EXPORT void positions_##NAME(const normlab::ByPosition* p, const void* x, void* y, int64_t threads) {        \
    const auto run = p->keep != nullptr ? normlab::positions<true, T> : normlab::positions<false, T>;                  \
    run(*p, static_cast<const T*>(x), static_cast<T*>(y), threads);                                                    \
  }                                                                                                                    \
  NORMLAB_EXPORT void positions_back_##NAME(const normlab::ByPosition* p, const void* x, const void* dy, void* dx,     \
                                            void* d_weight, void* d_bias, int64_t threads) {                           \
    const auto run = p->keep != nullptr ? normlab::positions_back<true, T> : normlab::positions_back<false, T>;        \
    run(*p, static_cast<const T*>(x), static_cast<const T*>(dy), static_cast<T*>(dx), d_weight, d_bias, threads);      \
  }

NORMLAB_PASSES(float, float32)
NORMLAB_PASSES(double, float64)
NORMLAB_PASSES(normlab::BFloat16, bfloat16)
