// The host's side of normlab/fused.py, compiled: allocates, fills the parameters of kernels that Triton has compiled,
// launches them through the CUDA driver and records the autograd node.
//
// It does what `_Normalize` does in Python, call for call, and declines whatever it has not seen Python do first:
// then it returns None and Python goes on. normlab/host.py builds it, with a C++ compiler and torch's headers alone;
// what it needs of CUDA it looks up by name when it runs.

#include <Python.h>
#include <dlfcn.h>
#include <structmember.h>

#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>

namespace {

using at::Tensor;
using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// --- Python objects --------------------------------------------------------------------------------------------------

// A reference that may be dropped by any thread, with the GIL or without.
class Kept {
 public:
  Kept() = default;
  explicit Kept(PyObject* borrowed) : object_(borrowed) { Py_XINCREF(object_); }
  Kept(Kept&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Kept& operator=(Kept&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;
  ~Kept() {
    if (object_ == nullptr || !Py_IsInitialized()) return;  // at exit, memory goes with the process
    const PyGILState_STATE state = PyGILState_Ensure();
    Py_DECREF(object_);
    PyGILState_Release(state);
  }
  PyObject* get() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

struct Decref {
  void operator()(PyObject* object) const { Py_XDECREF(object); }
};
using Owned = std::unique_ptr<PyObject, Decref>;  // for threads that hold the GIL

[[noreturn]] void throw_python_error() {
  python_error error;
  error.persist();
  throw error;
}

Owned checked(PyObject* fresh) {
  if (fresh == nullptr) throw_python_error();
  return Owned(fresh);
}

// None for a tensor that is not there.
Owned wrapped(const Tensor& t) { return checked(THPVariable_Wrap(t)); }

template <typename Items, typename Wrap>
Owned tuple_of(const Items& items, size_t number, Wrap wrap) {
  Owned made = checked(PyTuple_New(static_cast<Py_ssize_t>(number)));
  for (size_t i = 0; i < number; ++i) {
    PyTuple_SET_ITEM(made.get(), static_cast<Py_ssize_t>(i), wrap(items[i]).release());
  }
  return made;
}

Owned tensors_tuple(const Tensor* tensors, size_t number) { return tuple_of(tensors, number, wrapped); }

Owned numbers_tuple(const double* numbers, size_t number) {
  return tuple_of(numbers, number, [](double v) { return checked(PyFloat_FromDouble(v)); });
}

// --- the CUDA driver -------------------------------------------------------------------------------------------------

// Looked up by name: no CUDA header is needed to build this, and no CUDA library where there is no device.
struct Driver {
  using Size = unsigned int;
  int (*launch)(void*, Size, Size, Size, Size, Size, Size, Size, void*, void**, void**) = nullptr;
  int (*launch_together)(void*, Size, Size, Size, Size, Size, Size, Size, void*, void**) = nullptr;
  int (*is_capturing)(void*, int*) = nullptr;
  int (*current_context)(void**) = nullptr;
  int (*set_context)(void*) = nullptr;
  int (*retain_context)(void**, int) = nullptr;
  int (*device)(int*, int) = nullptr;
  int (*error_string)(int, const char**) = nullptr;
  int (*current_stream)(int32_t, void**) = nullptr;  // torch's, which keeps one for each thread and device

  // What is missing, or nothing.
  std::string open() {
    void* cuda = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    if (cuda == nullptr) return "libcuda.so.1";
    void* torch = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    if (torch == nullptr) return "libtorch_cuda.so";
    std::string missing;
    const auto find = [&missing](void* library, const char* name, auto& into) {
      into = reinterpret_cast<std::remove_reference_t<decltype(into)>>(dlsym(library, name));
      if (into == nullptr) missing = name;
    };
    find(cuda, "cuLaunchKernel", launch);
    find(cuda, "cuLaunchCooperativeKernel", launch_together);
    find(cuda, "cuStreamIsCapturing", is_capturing);
    find(cuda, "cuCtxGetCurrent", current_context);
    find(cuda, "cuCtxSetCurrent", set_context);
    find(cuda, "cuDevicePrimaryCtxRetain", retain_context);
    find(cuda, "cuDeviceGet", device);
    find(cuda, "cuGetErrorString", error_string);
    find(torch, "aoti_torch_get_current_cuda_stream", current_stream);
    return missing;
  }

  void check(int status, const char* what) const {
    if (status == 0) return;
    const char* said = nullptr;
    error_string(status, &said);
    TORCH_CHECK(false, "CUDA error when ", what, ": ", said == nullptr ? "unknown" : said);
  }

  // A thread that has only taken memory from torch's cache has no context yet.
  void ensure_context(int index) const {
    void* context = nullptr;
    check(current_context(&context), "asking for the context");
    if (context != nullptr) return;
    int handle = 0;
    check(device(&handle, index), "asking for the device");
    check(retain_context(&context, handle), "opening the device");
    check(set_context(context), "taking the context");
  }

  void* stream_of(int index) const {
    void* stream = nullptr;
    TORCH_CHECK(current_stream(index, &stream) == 0, "torch did not say which stream is current");
    return stream;
  }
};

Driver driver;

// Where the programs of a launch meet: one counter for each stream and number of programs, since launches of one
// stream follow each other. A captured graph may be replayed beside anything, so it has its own.
Tensor counter_of(int device, void* stream, unsigned programs) {
  const auto make = [device] {
    const auto at_device = c10::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device));
    return at::zeros({1}, at::TensorOptions().dtype(at::kLong).device(at_device));
  };
  int capturing = 0;
  driver.check(driver.is_capturing(stream, &capturing), "asking whether the stream is being captured");
  // Never destroyed: at exit the device may be gone first.
  static auto* known = new std::map<std::tuple<int, void*, unsigned>, Tensor>();
  static auto* spare = new std::map<int, std::pair<Tensor, int64_t>>();  // for graphs, and how many are given away
  static auto* guard = new std::mutex();
  const std::lock_guard<std::mutex> lock(*guard);
  auto& [of_graphs, given] = (*spare)[device];
  if (capturing != 0) {  // to make one in the graph is a kernel more
    const int64_t next = 2 * given;  // 16 bytes each, as kernels are compiled for
    if (!of_graphs.defined() || next >= of_graphs.numel()) return make();
    ++given;
    return of_graphs.narrow(0, next, 1);
  }
  if (!of_graphs.defined()) {  // zero, whatever stream a graph is replayed on: a copy is waited for, a kernel not
    const auto at_device = c10::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device));
    of_graphs = at::zeros({1 << 16}, at::kLong).to(at_device);
  }
  Tensor& found = (*known)[{device, stream, programs}];
  if (!found.defined()) found = make();
  return found;
}

// --- plans -----------------------------------------------------------------------------------------------------------

// One parameter of a kernel: an address or a number of the call, by its place, or a constant.
struct Slot {
  enum Kind : int { Address = 0, Number = 1, Int32 = 2, Int64 = 3, Null = 4 };
  Kind kind;
  int index;
  int64_t constant;
};

struct Launch {
  void* function = nullptr;
  unsigned grid = 1, threads = 1, shared = 0;
  bool meet = false;  // programs wait for each other: a cooperative launch, and a counter after the other tensors
  std::vector<Slot> slots;
  Kept callable;  // or Python's launch, where there is no device: Triton's interpreter
};

constexpr size_t Most = 32;  // tensors of a launch
constexpr size_t MostNumbers = 8;
constexpr size_t MostParameters = 96;

// Launch what Triton compiled, with the tensors of a call; the last address, for meeting, is not among them.
void run(const Launch& launch, const Tensor* tensors, size_t number, const uint64_t* shifts, const double* numbers,
         size_t how_many, const Tensor& work, bool meet, int device) {
  if (launch.callable) {
    const PyGILState_STATE state = PyGILState_Ensure();
    try {
      std::array<Tensor, Most> given;
      std::copy(tensors, tensors + number, given.begin());
      if (!meet) given[number] = work;
      const Owned taken = tensors_tuple(given.data(), meet ? number : number + 1);
      const Owned values = numbers_tuple(numbers, how_many);
      const Owned none = checked(PyTuple_New(0));
      checked(PyObject_CallFunctionObjArgs(launch.callable.get(), taken.get(), none.get(), values.get(), nullptr));
    } catch (...) {
      PyGILState_Release(state);
      throw;
    }
    PyGILState_Release(state);
    return;
  }
  std::array<uint64_t, Most> addresses;
  const auto first = reinterpret_cast<uint64_t>(tensors[0].const_data_ptr());
  for (size_t i = 0; i < number; ++i) {
    const uint64_t here = tensors[i].defined() ? reinterpret_cast<uint64_t>(tensors[i].const_data_ptr()) : first;
    addresses[i] = here + (shifts == nullptr ? 0 : shifts[i]);
  }
  std::array<float, MostNumbers> floats;
  for (size_t i = 0; i < how_many; ++i) floats[i] = static_cast<float>(numbers[i]);
  void* stream = driver.stream_of(device);
  Tensor counter;
  if (launch.meet) {
    counter = counter_of(device, stream, launch.grid);
    addresses[number] = reinterpret_cast<uint64_t>(counter.const_data_ptr());
  } else {
    addresses[number] = reinterpret_cast<uint64_t>(work.const_data_ptr());
  }
  std::array<void*, MostParameters> parameters;
  uint64_t null = 0;
  for (size_t i = 0; i < launch.slots.size(); ++i) {
    const Slot& slot = launch.slots[i];
    switch (slot.kind) {
      case Slot::Address: parameters[i] = &addresses[slot.index]; break;
      case Slot::Number: parameters[i] = &floats[slot.index]; break;
      case Slot::Null: parameters[i] = &null; break;
      default: parameters[i] = const_cast<int64_t*>(&slot.constant);  // little-endian: also an int32
    }
  }
  if (launch.meet) {
    driver.check(driver.launch_together(launch.function, launch.grid, 1, 1, launch.threads, 1, 1, launch.shared, stream,
                                        parameters.data()), "launching a kernel");
  } else {
    driver.check(driver.launch(launch.function, launch.grid, 1, 1, launch.threads, 1, 1, launch.shared, stream,
                               parameters.data(), nullptr), "launching a kernel");
  }
}

// A `Static` of sized.py: sizes, and launches of each direction once Python has compiled them.
struct Plan {
  enum Which : size_t { Forward = 0, Backward = 1, OfX = 2, OfParameters = 3 };
  int64_t forward_floats = 0, backward_floats = 0, parted = 0;
  int device = -1;
  bool last = false, reads = false, act = false, residual = false, meet = false;
  // Set once, under the GIL; read by threads that do not hold it.
  std::array<std::atomic<const std::vector<Launch>*>, 4> launches{};

  Plan() = default;
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan() {
    for (auto& made : launches) delete made.load();
  }

  Tensor floats(int64_t number, const Tensor& x) const { return at::empty({number}, x.options().dtype(at::kFloat)); }
};

// What a node needs beside its tensors; shared by the nodes of an entry.
struct Row {
  std::shared_ptr<Plan> plan;
  Kept fixed;  // the Static, which also keeps the compiled kernels
  Kept keep;  // what Python wants back, to differentiate again
};

Kept fallback;  // backward in Python: to record a graph, or to compile

// The types and the alignment of what a call is given: kernels are compiled for them.
constexpr size_t Given = 13;
struct Key {
  std::array<uint8_t, Given> types{};
  uint16_t unaligned = 0;
  bool operator==(const Key& other) const { return types == other.types && unaligned == other.unaligned; }
};

bool is_laid(const Tensor& x, bool last) {
  if (!last) return x.is_contiguous();
  if (x.size(1) != 1 && x.stride(1) != 1) return false;
  int64_t expected = x.size(1);
  for (int64_t axis = x.dim() - 1; axis >= 0; --axis) {
    if (axis == 1) continue;
    if (x.size(axis) != 1 && x.stride(axis) != expected) return false;
    expected *= x.size(axis);
  }
  return true;
}

// In the layout that kernels were compiled for; hooks of saved tensors may have changed it.
Tensor laid(const Tensor& x, bool last) {
  if (is_laid(x, last)) return x;
  return last ? x.movedim(1, -1).contiguous().movedim(-1, 1) : x.contiguous();
}

bool lies_like(const Tensor& t, const Tensor& x, bool last) {
  return last ? t.strides() == x.strides() : t.is_contiguous();
}

Tensor like(const Tensor& t, const Tensor& x, bool last) {
  if (lies_like(t, x, last)) return t;
  if (!last) return t.contiguous();
  return at::empty_strided(x.sizes(), x.strides(), x.options().dtype(t.scalar_type())).copy_(t);
}

Tensor empty_as(const Tensor& t) { return at::empty_strided(t.sizes(), t.strides(), t.options()); }

// Whether a backward pass is recorded, or dy is several at once (is_grads_batched): Python then differentiates.
bool wants_plain(const Tensor& dy) {
  const auto keys = dy.key_set();
  return at::GradMode::is_enabled() || keys.has(c10::DispatchKey::Batched) ||
         keys.has(c10::DispatchKey::FuncTorchBatched);
}

// --- autograd --------------------------------------------------------------------------------------------------------

enum Saved : size_t { X, Residual, Weight, Bias, Weight2, Bias2, MeanLogits, VarLogits, Differentiable };

struct NormalizeBackward : Node {
  std::shared_ptr<const Row> row;
  std::array<SavedVariable, Differentiable> saved;
  Tensor work, segment, label;
  std::array<double, 8> numbers;

  std::string name() const override { return "NormalizeBackward"; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& variable : saved) variable.reset_data();
    work.reset();
    segment.reset();
    label.reset();
  }

  variable_list apply(variable_list&& grads) override {
    std::unique_lock<std::mutex> lock(mutex_);
    std::array<Tensor, Differentiable> values;
    std::array<bool, Differentiable> needs;
    bool beside_x = false;
    for (size_t i = 0; i < Differentiable; ++i) {
      values[i] = saved[i].unpack();
      needs[i] = task_should_compute_output(i);
      beside_x = beside_x || (i > Residual && needs[i]);
    }
    const Plan& plan = *row->plan;
    c10::OptionalDeviceGuard guard;
    if (plan.device >= 0) guard.reset_device(values[X].device());
    Tensor dy = std::move(grads[0]);
    if (!dy.defined()) dy = at::zeros(values[X].sizes(), values[X].options());
    const bool plain = wants_plain(dy);
    const Tensor x = plain ? values[X] : laid(values[X], plan.last);
    Plan::Which which = Plan::Backward;
    if (!needs[X]) {
      which = Plan::OfParameters;
    } else if (!plan.reads && !(plan.act && plan.residual) && !beside_x) {
      which = Plan::OfX;
    }
    const auto* launches = plan.launches[which].load(std::memory_order_acquire);
    // Held from here on, and the lock is not: what Python runs may come back to this node.
    const Tensor work = this->work, segment = this->segment, label = this->label;
    lock.unlock();
    if (launches == nullptr || plain) return in_python(values, needs, dy, work, segment, label);

    dy = like(dy, x, plan.last);
    if (plan.device >= 0 && (reinterpret_cast<uint64_t>(dy.const_data_ptr()) & 15) != 0) {
      dy = dy.clone(at::MemoryFormat::Preserve);
    }
    Tensor d_weight, d_bias, d_weight2, d_bias2, d_mean, d_var, inner, beside;
    if (values[Weight].defined()) {
      d_weight = empty_as(values[Weight]);
      d_bias = empty_as(values[Bias]);
    }
    if (values[Weight2].defined() && label.defined()) {  // rows that no sample has get zero
      const Tensor& t = values[Weight2];
      const int64_t room = (t.numel() + 15) / 16 * 16;  // both begin at an address as kernels expect it
      const Tensor both = at::zeros({2 * room}, t.options());
      d_weight2 = both.as_strided(t.sizes(), t.strides(), 0);
      d_bias2 = both.as_strided(t.sizes(), t.strides(), room);
    } else if (values[Weight2].defined()) {
      d_weight2 = empty_as(values[Weight2]);
      d_bias2 = empty_as(values[Bias2]);
    }
    if (values[MeanLogits].defined()) {
      d_mean = empty_as(values[MeanLogits]);
      d_var = empty_as(values[VarLogits]);
    }
    const Tensor dx = needs[X] ? empty_as(x) : Tensor();
    // A residual's gradient is that before the activation; without one, dy itself.
    if (plan.residual && plan.act) inner = empty_as(x);
    if (values[Residual].defined()) beside = like(values[Residual], x, plan.last);
    const Tensor back = plan.floats(plan.backward_floats, x);
    const Tensor parted = plan.parted != 0 ? plan.floats(plan.parted, x) : back;
    const std::array<Tensor, 22> tensors = {
        dy, x, dx, beside, inner, work, back, parted, values[Weight], values[Bias], values[Weight2], values[Bias2],
        segment, label, values[MeanLogits], values[VarLogits], d_weight, d_bias, d_weight2, d_bias2, d_mean, d_var};
    const std::array<double, 2> eps_and_leak = {numbers[1], numbers[7]};
    if (plan.device >= 0) driver.ensure_context(plan.device);
    for (const Launch& launch : *launches) {
      run(launch, tensors.data(), tensors.size(), nullptr, eps_and_leak.data(), eps_and_leak.size(), work, plan.meet,
          plan.device);
    }
    const Tensor d_residual = plan.residual && needs[Residual] ? (inner.defined() ? inner : dy) : Tensor();
    return {dx, d_residual, d_weight, d_bias, d_weight2, d_bias2, d_mean, d_var};
  }

  variable_list in_python(const std::array<Tensor, Differentiable>& values,
                          const std::array<bool, Differentiable>& needs, const Tensor& dy, const Tensor& work,
                          const Tensor& segment, const Tensor& label) const {
    const PyGILState_STATE state = PyGILState_Ensure();
    variable_list found;
    try {
      const Owned given = numbers_tuple(numbers.data(), numbers.size());
      const Owned about = wrapped(segment), of = wrapped(label), room = wrapped(work), gradient = wrapped(dy);
      const Owned taken = tensors_tuple(values.data(), values.size());
      const Owned wanted = tuple_of(needs, needs.size(), [](bool v) { return checked(PyBool_FromLong(v)); });
      const Owned result = checked(PyObject_CallFunctionObjArgs(
          fallback.get(), row->fixed.get(), row->keep.get(), given.get(), about.get(), of.get(), room.get(),
          taken.get(), wanted.get(), gradient.get(), nullptr));
      TORCH_CHECK(PyTuple_Check(result.get()) && PyTuple_GET_SIZE(result.get()) == Differentiable);
      for (size_t i = 0; i < Differentiable; ++i) {
        PyObject* item = PyTuple_GET_ITEM(result.get(), static_cast<Py_ssize_t>(i));
        found.push_back(item == Py_None ? Tensor() : THPVariable_Unpack(item));
      }
    } catch (...) {
      PyGILState_Release(state);
      throw;
    }
    PyGILState_Release(state);
    return found;
  }
};

// Nodes are held by std::shared_ptr in some versions of torch, by c10::intrusive_ptr in others.
template <typename Pointer>
auto make_node() {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
    // torch's deleter, found by the argument's type: the other versions do not have it.
    return std::shared_ptr<NormalizeBackward>(new NormalizeBackward(), [](auto* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<NormalizeBackward>();
  }
}

// --- a way of calling a layer ----------------------------------------------------------------------------------------

// x, residual, weight, bias, weight2, bias2, mean and variance logits, segment, label, running mean and variance,
// batches: `tensors` of `_Normalize.forward`.
struct Call {
  std::array<Tensor, Given> given;
  Key key;
};

enum Place : size_t { Segment = 8, Label = 9, Mean = 10, Var = 11, Batches = 12 };
constexpr size_t Arguments = Given + 2;  // and the momentum and eps

struct Entry {
  PyObject_HEAD
  vectorcallfunc call;
  int64_t branch;
  bool last;
  std::array<double, 6> bounds;
  Kept* keep;
  std::vector<std::pair<Key, std::shared_ptr<const Row>>>* rows;
};

// Plain tensors on x's device, dense: anything else is Python's.
bool take(PyObject* const* args, const Entry& entry, Call& into) {
  static const uint64_t plain = c10::DispatchKeySet({
      c10::DispatchKey::CPU, c10::DispatchKey::CUDA, c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutogradCUDA,
      c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA}).raw_repr();
  auto& given = into.given;
  for (size_t i = 0; i < Given; ++i) {
    if (args[i] == Py_None) continue;
    if (!THPVariable_CheckExact(args[i])) return false;
    given[i] = THPVariable_Unpack(args[i]);
    if ((given[i].key_set().raw_repr() & ~plain) != 0) return false;
  }
  const Tensor& x = given[X];
  if (!x.defined() || x.dim() < 2) return false;
  if (!is_laid(x, entry.last)) return false;
  const c10::Device device = x.device();
  const bool cuda = x.is_cuda();
  for (size_t i = 0; i < Given; ++i) {
    const Tensor& t = given[i];
    into.key.types[i] = static_cast<uint8_t>((t.defined() ? t : x).scalar_type());
    if (!t.defined()) continue;
    if (t.device() != device || !(i == Residual ? t.sizes() == x.sizes() : i == X || t.is_contiguous())) return false;
    if (i == Label && (t.dim() != 1 || t.size(0) != x.size(0))) return false;
    if ((i == Weight || i == Bias) && t.numel() != x.size(1)) return false;
    if (!cuda) continue;
    if (i == Residual && !lies_like(t, x, entry.last)) continue;  // it is copied, and the copy is aligned
    uint64_t address = reinterpret_cast<uint64_t>(t.const_data_ptr());
    if (i == Mean || i == Var) address += entry.branch * t.size(-1) * t.element_size();
    if (i == Batches) address += entry.branch * t.element_size();
    if ((address & 15) != 0) into.key.unaligned |= static_cast<uint16_t>(1U << i);
  }
  return true;
}

// Whether nothing around this call changes what it means: a transform of torch.func, forward-mode differentiation, a
// tracer or a mode that wants to see each operator, a backward pass in which checkpointing runs forward again.
bool usual() {
  const auto included = c10::impl::tls_local_dispatch_key_set().included_;
  return !included.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) &&
         !included.has(c10::DispatchKey::Tracer) && !c10::impl::dispatch_mode_enabled() &&
         torch::autograd::get_current_graph_task_id() == -1 &&
         torch::autograd::ForwardADLevel::try_get_by_idx(0) == nullptr;
}

Tensor normalize(const Call& call, const Entry& entry, const std::shared_ptr<const Row>& row,
                 const std::array<double, 8>& numbers) {
  const Plan& plan = *row->plan;
  const auto& given = call.given;
  const Tensor& x = given[X];
  c10::OptionalDeviceGuard guard;
  if (plan.device >= 0) guard.reset_device(x.device());
  Tensor y, work;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    y = empty_as(x);
    work = plan.floats(plan.forward_floats, x);
    const Tensor parted = plan.parted != 0 ? plan.floats(plan.parted, x) : work;
    const Tensor beside = given[Residual].defined() ? like(given[Residual], x, plan.last) : Tensor();
    std::array<Tensor, 16> tensors = {
        x, y, beside, work, parted, given[Weight], given[Bias], given[Weight2], given[Bias2], given[Segment],
        given[Label], given[MeanLogits], given[VarLogits], given[Mean], given[Var], given[Batches]};
    std::array<uint64_t, 16> shifts{};
    if (entry.branch != 0 && given[Mean].defined()) {
      for (size_t i = 13; i < 16; ++i) {
        if (plan.device < 0) {
          tensors[i] = tensors[i].select(0, entry.branch);
        } else {
          const int64_t row_size = i == 15 ? 1 : tensors[i].size(-1);
          shifts[i] = entry.branch * row_size * tensors[i].element_size();
        }
      }
    }
    if (plan.device >= 0) driver.ensure_context(plan.device);
    for (const Launch& launch : *plan.launches[Plan::Forward].load(std::memory_order_acquire)) {
      run(launch, tensors.data(), tensors.size(), shifts.data(), numbers.data(), numbers.size(), work, plan.meet,
          plan.device);
    }
  }
  const bool recorded = torch::autograd::compute_requires_grad(
      given[X], given[Residual], given[Weight], given[Bias], given[Weight2], given[Bias2], given[MeanLogits],
      given[VarLogits]);
  if (recorded) {
    auto node = make_node<decltype(Edge::function)>();
    node->set_next_edges(torch::autograd::collect_next_edges(
        given[X], given[Residual], given[Weight], given[Bias], given[Weight2], given[Bias2], given[MeanLogits],
        given[VarLogits]));
    node->row = row;
    for (size_t i = 0; i < Differentiable; ++i) node->saved[i] = SavedVariable(given[i], false);
    node->work = std::move(work);
    node->segment = given[Segment];
    node->label = given[Label];
    node->numbers = numbers;
    torch::autograd::set_history(y, node);
  }
  return y;
}

PyObject* entry_call(PyObject* self, PyObject* const* args, size_t flags, PyObject* names) {
  HANDLE_TH_ERRORS
  const auto& entry = *reinterpret_cast<Entry*>(self);
  TORCH_CHECK_TYPE(PyVectorcall_NARGS(flags) == Arguments && names == nullptr,
                   "an entry takes 13 tensors or None, a momentum and an epsilon");
  if (entry.rows->empty() || !usual()) Py_RETURN_NONE;
  Call call;
  if (!take(args, entry, call)) Py_RETURN_NONE;
  const std::shared_ptr<const Row>* found = nullptr;
  for (const auto& [key, row] : *entry.rows) {
    if (key == call.key) found = &row;
  }
  if (found == nullptr) Py_RETURN_NONE;
  const std::shared_ptr<const Row> row = *found;
  std::array<double, 8> numbers;
  for (size_t i = 0; i < 2; ++i) {
    numbers[i] = PyFloat_AsDouble(args[Given + i]);
    if (numbers[i] == -1.0 && PyErr_Occurred() != nullptr) return nullptr;
  }
  std::copy(entry.bounds.begin(), entry.bounds.end(), numbers.begin() + 2);
  Tensor y;
  {
    const pybind11::gil_scoped_release release;
    y = normalize(call, entry, row, numbers);
  }
  return THPVariable_Wrap(std::move(y));
  END_HANDLE_TH_ERRORS
}

// --- what Python sees ------------------------------------------------------------------------------------------------

struct PlanObject {
  PyObject_HEAD
  std::shared_ptr<Plan>* plan;
};

PyObject* plan_new(PyTypeObject* type, PyObject* args, PyObject* /*kwargs*/) {
  HANDLE_TH_ERRORS
  long long forward = 0, backward = 0, parted = 0;
  int device = 0, last = 0, reads = 0, act = 0, residual = 0, meet = 0;
  if (PyArg_ParseTuple(args, "LLLippppp", &forward, &backward, &parted, &device, &last, &reads, &act, &residual,
                       &meet) == 0) {
    return nullptr;
  }
  Owned made = checked(type->tp_alloc(type, 0));
  auto plan = std::make_shared<Plan>();
  plan->forward_floats = forward;
  plan->backward_floats = backward;
  plan->parted = parted;
  plan->device = device;
  plan->last = last != 0;
  plan->reads = reads != 0;
  plan->act = act != 0;
  plan->residual = residual != 0;
  plan->meet = meet != 0;
  reinterpret_cast<PlanObject*>(made.get())->plan = new std::shared_ptr<Plan>(std::move(plan));
  return made.release();
  END_HANDLE_TH_ERRORS
}

void plan_dealloc(PyObject* self) {
  delete reinterpret_cast<PlanObject*>(self)->plan;
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// Launches from a list: each a callable, or (function, grid, threads, shared, meet, ((kind, index, constant), ...)).
std::vector<Launch> launches_from(PyObject* list) {
  std::vector<Launch> made(PyList_GET_SIZE(list));
  for (size_t i = 0; i < made.size(); ++i) {
    PyObject* item = PyList_GET_ITEM(list, static_cast<Py_ssize_t>(i));
    Launch& launch = made[i];
    if (PyTuple_Check(item) == 0) {
      launch.callable = Kept(item);
      continue;
    }
    unsigned long long function = 0;
    int meet = 0;
    PyObject* slots = nullptr;
    if (PyArg_ParseTuple(item, "KIIIpO!", &function, &launch.grid, &launch.threads, &launch.shared, &meet,
                         &PyTuple_Type, &slots) == 0) {
      throw_python_error();
    }
    launch.function = reinterpret_cast<void*>(function);
    launch.meet = meet != 0;
    TORCH_CHECK_VALUE(static_cast<size_t>(PyTuple_GET_SIZE(slots)) <= MostParameters, "a kernel has at most ",
                      MostParameters, " parameters here");
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(slots); ++k) {
      int kind = 0, index = 0;
      long long constant = 0;
      if (PyArg_ParseTuple(PyTuple_GET_ITEM(slots, k), "iiL", &kind, &index, &constant) == 0) throw_python_error();
      TORCH_CHECK_VALUE(index >= 0 && index < static_cast<int>(Most), "there is no tensor or number ", index);
      launch.slots.push_back({static_cast<Slot::Kind>(kind), index, constant});
    }
  }
  return made;
}

PyObject* plan_set(PyObject* self, PyObject* args) {
  HANDLE_TH_ERRORS
  unsigned int which = 0;
  PyObject* list = nullptr;
  if (PyArg_ParseTuple(args, "IO!", &which, &PyList_Type, &list) == 0) return nullptr;
  auto& place = (*reinterpret_cast<PlanObject*>(self)->plan)->launches.at(which);
  if (place.load() != nullptr) Py_RETURN_NONE;
  place.store(new std::vector<Launch>(launches_from(list)), std::memory_order_release);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* plan_has(PyObject* self, PyObject* which) {
  HANDLE_TH_ERRORS
  const size_t index = PyLong_AsSize_t(which);
  if (PyErr_Occurred() != nullptr) return nullptr;
  return PyBool_FromLong((*reinterpret_cast<PlanObject*>(self)->plan)->launches.at(index).load() != nullptr);
  END_HANDLE_TH_ERRORS
}

PyMethodDef plan_methods[] = {
    {"set", plan_set, METH_VARARGS, "The launches of forward (0), backward (1), of x alone (2), of parameters (3)."},
    {"has", plan_has, METH_O, "Whether the launches of a direction are set."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot plan_slots[] = {{Py_tp_new, reinterpret_cast<void*>(plan_new)},
                            {Py_tp_dealloc, reinterpret_cast<void*>(plan_dealloc)},
                            {Py_tp_methods, plan_methods},
                            {0, nullptr}};
PyType_Spec plan_spec = {"normlab_host.Plan", sizeof(PlanObject), 0, Py_TPFLAGS_DEFAULT, plan_slots};
PyTypeObject* plan_type = nullptr;

PyObject* entry_new(PyTypeObject* type, PyObject* args, PyObject* /*kwargs*/) {
  HANDLE_TH_ERRORS
  long long branch = 0;
  int last = 0;
  std::array<double, 6> b{};
  PyObject* keep = nullptr;
  if (PyArg_ParseTuple(args, "Lp(dddddd)O", &branch, &last, &b[0], &b[1], &b[2], &b[3], &b[4], &b[5], &keep) == 0) {
    return nullptr;
  }
  Owned made = checked(type->tp_alloc(type, 0));
  auto* entry = reinterpret_cast<Entry*>(made.get());
  entry->call = entry_call;
  entry->branch = branch;
  entry->last = last != 0;
  entry->bounds = b;
  entry->keep = new Kept(keep);
  entry->rows = new std::vector<std::pair<Key, std::shared_ptr<const Row>>>();
  return made.release();
  END_HANDLE_TH_ERRORS
}

void entry_dealloc(PyObject* self) {
  auto* entry = reinterpret_cast<Entry*>(self);
  delete entry->rows;
  delete entry->keep;
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// learn(plan, static, the 13 tensors): serve calls like this one from now on. Whether it will.
PyObject* entry_learn(PyObject* self, PyObject* const* args, Py_ssize_t number) {
  HANDLE_TH_ERRORS
  auto& entry = *reinterpret_cast<Entry*>(self);
  TORCH_CHECK_TYPE(number == 2 + Given && Py_TYPE(args[0]) == plan_type, "learn takes a plan, a static and 13 tensors");
  const auto& plan = *reinterpret_cast<PlanObject*>(args[0])->plan;
  Call call;
  if (plan->launches[Plan::Forward].load() == nullptr || entry.rows->size() >= 64) Py_RETURN_FALSE;
  if (!take(args + 2, entry, call)) Py_RETURN_FALSE;
  for (const auto& [key, row] : *entry.rows) {
    if (key == call.key) Py_RETURN_TRUE;
  }
  auto row = std::make_shared<Row>();
  row->plan = plan;
  row->fixed = Kept(args[1]);
  row->keep = Kept(entry.keep->get());
  entry.rows->emplace_back(call.key, std::move(row));
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef entry_methods[] = {
    {"learn", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(entry_learn)), METH_FASTCALL,
     "Serve calls like this one from now on."},
    {nullptr, nullptr, 0, nullptr}};

PyMemberDef entry_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Entry, call), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PyType_Slot entry_slots[] = {{Py_tp_new, reinterpret_cast<void*>(entry_new)},
                             {Py_tp_dealloc, reinterpret_cast<void*>(entry_dealloc)},
                             {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                             {Py_tp_methods, entry_methods},
                             {Py_tp_members, entry_members},
                             {0, nullptr}};
PyType_Spec entry_spec = {"normlab_host.Entry", sizeof(Entry), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
                          entry_slots};

// Launches that follow each other, for a `Stage` of host.py.
struct Stage {
  PyObject_HEAD
  vectorcallfunc call;
  int device;
  std::vector<Launch>* launches;
};

// stage(tensors, numbers): both tuples; None for a tensor that is not there.
PyObject* stage_call(PyObject* self, PyObject* const* args, size_t flags, PyObject* names) {
  HANDLE_TH_ERRORS
  const auto& stage = *reinterpret_cast<Stage*>(self);
  TORCH_CHECK_TYPE(PyVectorcall_NARGS(flags) == 2 && names == nullptr && PyTuple_Check(args[0]) != 0 &&
                   PyTuple_Check(args[1]) != 0, "a stage takes a tuple of tensors or None, and one of numbers");
  const auto number = static_cast<size_t>(PyTuple_GET_SIZE(args[0]));
  const auto how_many = static_cast<size_t>(PyTuple_GET_SIZE(args[1]));
  std::array<Tensor, Most> tensors;
  std::array<double, MostNumbers> numbers{};
  TORCH_CHECK_VALUE(number > 0 && number < Most && how_many <= numbers.size(), "a stage takes at most ", Most - 1,
                    " tensors and ", numbers.size(), " numbers");
  for (size_t i = 0; i < number; ++i) {
    PyObject* item = PyTuple_GET_ITEM(args[0], static_cast<Py_ssize_t>(i));
    if (item == Py_None) continue;
    TORCH_CHECK_TYPE(THPVariable_Check(item), "a stage takes tensors");
    tensors[i] = THPVariable_Unpack(item);
  }
  TORCH_CHECK_VALUE(tensors[0].defined(), "the first tensor of a stage is there");
  for (size_t i = 0; i < how_many; ++i) {
    numbers[i] = PyFloat_AsDouble(PyTuple_GET_ITEM(args[1], static_cast<Py_ssize_t>(i)));
    if (numbers[i] == -1.0 && PyErr_Occurred() != nullptr) return nullptr;
  }
  {
    const pybind11::gil_scoped_release release;
    c10::OptionalDeviceGuard guard;
    if (stage.device >= 0) {
      guard.reset_device(tensors[0].device());
      driver.ensure_context(stage.device);
    }
    for (const Launch& launch : *stage.launches) {
      run(launch, tensors.data(), number, nullptr, numbers.data(), how_many, tensors[0], true, stage.device);
    }
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* stage_new(PyTypeObject* type, PyObject* args, PyObject* /*kwargs*/) {
  HANDLE_TH_ERRORS
  int device = 0;
  PyObject* list = nullptr;
  if (PyArg_ParseTuple(args, "iO!", &device, &PyList_Type, &list) == 0) return nullptr;
  auto launches = std::make_unique<std::vector<Launch>>(launches_from(list));
  Owned made = checked(type->tp_alloc(type, 0));
  auto* stage = reinterpret_cast<Stage*>(made.get());
  stage->call = stage_call;
  stage->device = device;
  stage->launches = launches.release();
  return made.release();
  END_HANDLE_TH_ERRORS
}

void stage_dealloc(PyObject* self) {
  delete reinterpret_cast<Stage*>(self)->launches;
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMemberDef stage_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Stage, call), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PyType_Slot stage_slots[] = {{Py_tp_new, reinterpret_cast<void*>(stage_new)},
                             {Py_tp_dealloc, reinterpret_cast<void*>(stage_dealloc)},
                             {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                             {Py_tp_members, stage_members},
                             {0, nullptr}};
PyType_Spec stage_spec = {"normlab_host.Stage", sizeof(Stage), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
                          stage_slots};

PyObject* open_driver(PyObject* /*module*/, PyObject* /*none*/) {
  HANDLE_TH_ERRORS
  const std::string missing = driver.open();
  return PyUnicode_FromString(missing.c_str());
  END_HANDLE_TH_ERRORS
}

PyObject* set_fallback(PyObject* /*module*/, PyObject* callable) {
  Py_INCREF(callable);
  static PyObject* held = nullptr;  // never dropped: nodes may outlive the module
  Py_XSETREF(held, callable);
  fallback = Kept(callable);
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"open_driver", open_driver, METH_NOARGS, "Look up the CUDA driver; returns what is missing, or ''."},
    {"set_fallback", set_fallback, METH_O, "Backward in Python, for nodes whose launches are not known."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "normlab_host", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

extern "C" __attribute__((visibility("default"))) PyObject* PyInit_normlab_host() {
  HANDLE_TH_ERRORS
  Owned made = checked(PyModule_Create(&module));
  plan_type = reinterpret_cast<PyTypeObject*>(checked(PyType_FromSpec(&plan_spec)).release());
  Owned entry = checked(PyType_FromSpec(&entry_spec));
  if (PyModule_AddObjectRef(made.get(), "Plan", reinterpret_cast<PyObject*>(plan_type)) != 0) return nullptr;
  if (PyModule_AddObjectRef(made.get(), "Entry", entry.get()) != 0) return nullptr;
  Owned stage = checked(PyType_FromSpec(&stage_spec));
  if (PyModule_AddObjectRef(made.get(), "Stage", stage.get()) != 0) return nullptr;
  return made.release();
  END_HANDLE_TH_ERRORS
}
