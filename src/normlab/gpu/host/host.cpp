// The host's part of normlab/gpu/autograd.py, compiled. It allocates, fills the parameters of kernels that Triton has
// compiled, launches them through the CUDA driver and records the autograd node.
//
// It does what `_Normalize` does in Python, call for call. It serves only calls like those that Python has run before;
// for any other it returns None, and Python goes on. library.py builds it with a C++ compiler and torch's headers
// alone. It looks up CUDA's functions by name when it runs.

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

// A reference that any thread may drop, with the GIL or without.
class PyRef {
 public:
  PyRef() = default;
  explicit PyRef(PyObject* borrowed) : object_(borrowed) { Py_XINCREF(object_); }
  PyRef(PyRef&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  PyRef& operator=(PyRef&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  PyRef(const PyRef&) = delete;
  PyRef& operator=(const PyRef&) = delete;
  ~PyRef() {
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

// None for an undefined tensor.
Owned wrapped(const Tensor& t) { return checked(THPVariable_Wrap(t)); }

template <typename Items, typename Wrap>
Owned tuple_of(const Items& items, size_t number, Wrap wrap) {
  Owned tuple = checked(PyTuple_New(static_cast<Py_ssize_t>(number)));
  for (size_t i = 0; i < number; ++i) {
    PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i), wrap(items[i]).release());
  }
  return tuple;
}

Owned tensors_tuple(const Tensor* tensors, size_t number) { return tuple_of(tensors, number, wrapped); }

Owned numbers_tuple(const double* numbers, size_t number) {
  return tuple_of(numbers, number, [](double v) { return checked(PyFloat_FromDouble(v)); });
}

// --- the CUDA driver -------------------------------------------------------------------------------------------------

// Looked up by name, so the build needs no CUDA header, and a machine without a device needs no CUDA library.
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
  int (*current_stream)(int32_t, void**) = nullptr;  // torch keeps one for each thread and device

  // Returns the name of what is missing, or nothing.
  std::string open() {
    void* cuda = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    if (cuda == nullptr) return "libcuda.so.1";
    void* torch = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    if (torch == nullptr) return "libtorch_cuda.so";
    std::string missing;
    const auto find = [&missing](void* library, const char* name, auto& function) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      if (function == nullptr) missing = name;
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

  // A thread has no context yet if it has only taken memory from torch's cache.
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

// The counter by which the programs of a launch wait for each other. Launches on one stream follow each other, so there
// is one counter for each stream and number of programs. A captured graph may be replayed beside anything, so each of
// its launches has its own. counters.py does the same for launches from Python.
Tensor counter_of(int device, void* stream, unsigned programs) {
  const auto make = [device] {
    const auto at_device = c10::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device));
    return at::zeros({1}, at::TensorOptions().dtype(at::kLong).device(at_device));
  };
  int capturing = 0;
  driver.check(driver.is_capturing(stream, &capturing), "asking whether the stream is being captured");
  // Never destroyed: at exit the device may be gone first.
  static auto* known = new std::map<std::tuple<int, void*, unsigned>, Tensor>();
  static auto* unused = new std::map<int, std::pair<Tensor, int64_t>>();  // for graphs, and how many are given away
  static auto* guard = new std::mutex();
  const std::lock_guard<std::mutex> lock(*guard);
  auto& [for_graphs, given_away] = (*unused)[device];
  if (capturing != 0) {  // to zero a counter in the graph costs a kernel
    const int64_t next = 2 * given_away;  // kernels are compiled for addresses that are multiples of 16
    if (!for_graphs.defined() || next >= for_graphs.numel()) return make();
    ++given_away;
    return for_graphs.narrow(0, next, 1);
  }
  if (!for_graphs.defined()) {  // zero on whatever stream a graph is replayed: a copy is waited for, a kernel is not
    const auto at_device = c10::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device));
    for_graphs = at::zeros({1 << 16}, at::kLong).to(at_device);
  }
  Tensor& found = (*known)[{device, stream, programs}];
  if (!found.defined()) found = make();
  return found;
}

// --- plans -----------------------------------------------------------------------------------------------------------

// One parameter of a kernel: an address or a number of the call, by its index, or a constant.
struct Slot {
  enum Kind : int { Address = 0, Number = 1, Int32 = 2, Int64 = 3, Null = 4 };
  Kind kind;
  int index;
  int64_t constant;
};

struct Launch {
  void* function = nullptr;
  unsigned grid = 1, threads = 1, shared = 0;
  bool meet = false;  // programs wait for each other: a cooperative launch, with a counter after the other tensors
  std::vector<Slot> slots;
  PyRef callable;  // or Python's launch, for Triton's interpreter
};

constexpr size_t MaxTensors = 32;  // tensors of a launch
constexpr size_t MaxNumbers = 8;
constexpr size_t MaxParameters = 96;

// Launch a kernel with the tensors of a call. A kernel has one more tensor: the counter by which its programs meet, or
// `last` where they do not meet. `offsets`, if any, are bytes to add to the addresses.
void run(const Launch& launch, const Tensor* tensors, size_t tensor_count, const uint64_t* offsets,
         const double* numbers, size_t number_count, const Tensor& last, bool meet, int device) {
  if (launch.callable) {
    const PyGILState_STATE state = PyGILState_Ensure();
    try {
      std::array<Tensor, MaxTensors> all;
      std::copy(tensors, tensors + tensor_count, all.begin());
      if (!meet) all[tensor_count] = last;
      const Owned arguments = tensors_tuple(all.data(), meet ? tensor_count : tensor_count + 1);
      const Owned values = numbers_tuple(numbers, number_count);
      const Owned no_addresses = checked(PyTuple_New(0));
      checked(PyObject_CallFunctionObjArgs(launch.callable.get(), arguments.get(), no_addresses.get(), values.get(),
                                           nullptr));
    } catch (...) {
      PyGILState_Release(state);
      throw;
    }
    PyGILState_Release(state);
    return;
  }
  std::array<uint64_t, MaxTensors> addresses;
  const auto first = reinterpret_cast<uint64_t>(tensors[0].const_data_ptr());
  for (size_t i = 0; i < tensor_count; ++i) {
    const uint64_t here = tensors[i].defined() ? reinterpret_cast<uint64_t>(tensors[i].const_data_ptr()) : first;
    addresses[i] = here + (offsets == nullptr ? 0 : offsets[i]);
  }
  std::array<float, MaxNumbers> floats;
  for (size_t i = 0; i < number_count; ++i) floats[i] = static_cast<float>(numbers[i]);
  void* stream = driver.stream_of(device);
  Tensor counter;
  if (launch.meet) {
    counter = counter_of(device, stream, launch.grid);
    addresses[tensor_count] = reinterpret_cast<uint64_t>(counter.const_data_ptr());
  } else {
    addresses[tensor_count] = reinterpret_cast<uint64_t>(last.const_data_ptr());
  }
  std::array<void*, MaxParameters> parameters;
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

// A `LaunchPlan` of launch_plans.py: sizes, and the launches of each direction once Python has compiled them.
struct Plan {
  enum Which : size_t { Forward = 0, Backward = 1, OfX = 2, OfParameters = 3 };
  int64_t forward_floats = 0, backward_floats = 0, partial_floats = 0;
  int device = -1;
  bool channels_last = false, reads = false, residual = false, meet = false;
  bool has_inner = false;  // the gradient of the residual is one of its own, and not dy
  // Set once, under the GIL; read by threads that do not hold it.
  std::array<std::atomic<const std::vector<Launch>*>, 4> launches{};

  Plan() = default;
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan() {
    for (auto& list : launches) delete list.load();
  }

  Tensor floats(int64_t number, const Tensor& x) const { return at::empty({number}, x.options().dtype(at::kFloat)); }
};

// What a node needs besides its tensors. The nodes of an entry share it.
struct LearnedCall {
  std::shared_ptr<Plan> plan;
  PyRef python_plan;  // the LaunchPlan, which also keeps the compiled kernels alive
  PyRef rule_and_rows;  // Python takes them back for double backward
  uint16_t unaligned = 0;  // which tensors of forward had an address that is no multiple of 16
};

PyRef fallback;  // backward in Python: to record a graph, or to compile

// The types and the alignment of the tensors of a call: kernels are compiled for them.
constexpr size_t InputCount = 14;
struct Key {
  std::array<uint8_t, InputCount> types{};
  uint16_t unaligned = 0;
  bool operator==(const Key& other) const { return types == other.types && unaligned == other.unaligned; }
};

bool is_in_layout(const Tensor& x, bool channels_last) {
  if (!channels_last) return x.is_contiguous();
  if (x.size(1) != 1 && x.stride(1) != 1) return false;
  int64_t expected = x.size(1);
  for (int64_t axis = x.dim() - 1; axis >= 0; --axis) {
    if (axis == 1) continue;
    if (x.size(axis) != 1 && x.stride(axis) != expected) return false;
    expected *= x.size(axis);
  }
  return true;
}

// `x` in the layout that kernels were compiled for. Hooks of saved tensors may have changed it.
Tensor in_layout(const Tensor& x, bool channels_last) {
  if (is_in_layout(x, channels_last)) return x;
  return channels_last ? x.movedim(1, -1).contiguous().movedim(-1, 1) : x.contiguous();
}

bool has_layout_of(const Tensor& t, const Tensor& x, bool channels_last) {
  return channels_last ? t.strides() == x.strides() : t.is_contiguous();
}

Tensor in_layout_of(const Tensor& t, const Tensor& x, bool channels_last) {
  if (has_layout_of(t, x, channels_last)) return t;
  if (!channels_last) return t.contiguous();
  return at::empty_strided(x.sizes(), x.strides(), x.options().dtype(t.scalar_type())).copy_(t);
}

bool is_unaligned(const Tensor& t) { return (reinterpret_cast<uint64_t>(t.const_data_ptr()) & 15) != 0; }

Tensor empty_as(const Tensor& t) { return at::empty_strided(t.sizes(), t.strides(), t.options()); }

// Whether the backward pass is recorded, or dy is several at once (is_grads_batched). Python serves both.
bool wants_plain(const Tensor& dy) {
  const auto keys = dy.key_set();
  return at::GradMode::is_enabled() || keys.has(c10::DispatchKey::Batched) ||
         keys.has(c10::DispatchKey::FuncTorchBatched);
}

// --- autograd --------------------------------------------------------------------------------------------------------

enum Saved : size_t { X, Residual, Weight, Bias, Weight2, Bias2, MeanLogits, VarLogits, Differentiable };
// The tensors of a call that come after them.
enum Others : size_t { Segment = 8, Label = 9, Mean = 10, Var = 11, Batches = 12, Mask = 13 };

struct NormalizeBackward : Node {
  std::shared_ptr<const LearnedCall> learned;
  std::array<SavedVariable, Differentiable> saved;
  SavedVariable saved_mask;
  Tensor work, segment, label;
  std::array<double, 8> numbers;

  std::string name() const override { return "NormalizeBackward"; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& variable : saved) variable.reset_data();
    saved_mask.reset_data();
    work.reset();
    segment.reset();
    label.reset();
  }

  variable_list apply(variable_list&& grads) override {
    std::unique_lock<std::mutex> lock(mutex_);
    std::array<Tensor, Differentiable> values;
    std::array<bool, Differentiable> needs;
    bool needs_more = false;  // a gradient besides those of x and the residual
    for (size_t i = 0; i < Differentiable; ++i) {
      values[i] = saved[i].unpack();
      needs[i] = task_should_compute_output(i);
      needs_more = needs_more || (i > Residual && needs[i]);
    }
    const Tensor mask = saved_mask.unpack();
    const Plan& plan = *learned->plan;
    c10::OptionalDeviceGuard guard;
    if (plan.device >= 0) guard.reset_device(values[X].device());
    Tensor dy = std::move(grads[0]);
    if (!dy.defined()) dy = at::zeros(values[X].sizes(), values[X].options());
    const bool plain = wants_plain(dy);
    const Tensor x = plain ? values[X] : in_layout(values[X], plan.channels_last);
    Plan::Which which = Plan::Backward;
    if (!needs[X]) {
      which = Plan::OfParameters;
    } else if (!plan.reads && !plan.has_inner && !needs_more) {
      which = Plan::OfX;
    }
    const auto* launches = plan.launches[which].load(std::memory_order_acquire);
    // These references live on without the lock: what Python runs may come back to this node.
    const Tensor work = this->work, segment = this->segment, label = this->label;
    lock.unlock();
    if (launches == nullptr || plain) return in_python(values, needs, dy, work, segment, label, mask);
    Tensor residual_like_x;
    if (values[Residual].defined()) residual_like_x = in_layout_of(values[Residual], x, plan.channels_last);
    bool as_in_forward = is_as_in_forward(x, X) && is_as_in_forward(residual_like_x, Residual) &&
                         is_as_in_forward(mask, Mask);
    for (size_t i = Weight; i < Differentiable; ++i) as_in_forward = as_in_forward && is_as_in_forward(values[i], i);
    if (!as_in_forward) return in_python(values, needs, dy, work, segment, label, mask);

    dy = in_layout_of(dy, x, plan.channels_last);
    if (is_unaligned(dy)) dy = dy.clone(at::MemoryFormat::Preserve);
    Tensor d_weight, d_bias, d_weight2, d_bias2, d_mean, d_var, d_inner;
    if (values[Weight].defined()) {
      d_weight = empty_as(values[Weight]);
      d_bias = empty_as(values[Bias]);
    }
    if (values[Weight2].defined() && label.defined()) {  // rows of the table that no sample chose have a zero gradient
      const Tensor& t = values[Weight2];
      const int64_t room = (t.numel() + 15) / 16 * 16;  // kernels expect both to begin at a multiple of 16 bytes
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
    // The residual's gradient is the gradient before the activation; without an activation and a mask, it is dy.
    if (plan.has_inner) d_inner = empty_as(x);
    const Tensor back = plan.floats(plan.backward_floats, x);
    const Tensor partials = plan.partial_floats != 0 ? plan.floats(plan.partial_floats, x) : back;
    const std::array<Tensor, 23> tensors = {
        dy, x, dx, residual_like_x, d_inner, work, back, partials, values[Weight], values[Bias], values[Weight2],
        values[Bias2], segment, label, values[MeanLogits], values[VarLogits], d_weight, d_bias, d_weight2, d_bias2,
        d_mean, d_var, mask};
    const std::array<double, 2> eps_and_leak = {numbers[1], numbers[7]};
    if (plan.device >= 0) driver.ensure_context(plan.device);
    for (const Launch& launch : *launches) {
      run(launch, tensors.data(), tensors.size(), nullptr, eps_and_leak.data(), eps_and_leak.size(), work, plan.meet,
          plan.device);
    }
    const Tensor d_residual = plan.residual && needs[Residual] ? (d_inner.defined() ? d_inner : dy) : Tensor();
    return {dx, d_residual, d_weight, d_bias, d_weight2, d_bias2, d_mean, d_var};
  }

  // Whether kernels take a tensor as they took it in forward. Hooks of saved tensors may have moved it.
  bool is_as_in_forward(const Tensor& t, size_t i) const {
    if (!t.defined()) return true;
    return (i <= Residual || t.is_contiguous()) && is_unaligned(t) == ((learned->unaligned >> i & 1) != 0);
  }

  variable_list in_python(const std::array<Tensor, Differentiable>& values,
                          const std::array<bool, Differentiable>& needs, const Tensor& dy, const Tensor& work,
                          const Tensor& segment, const Tensor& label, const Tensor& mask) const {
    const PyGILState_STATE state = PyGILState_Ensure();
    variable_list found;
    try {
      const Owned py_numbers = numbers_tuple(numbers.data(), numbers.size());
      const Owned py_segment = wrapped(segment), py_label = wrapped(label), py_work = wrapped(work);
      const Owned py_mask = wrapped(mask);
      const Owned py_values = tensors_tuple(values.data(), values.size());
      const Owned py_needs = tuple_of(needs, needs.size(), [](bool v) { return checked(PyBool_FromLong(v)); });
      const Owned py_dy = wrapped(dy);
      const Owned result = checked(PyObject_CallFunctionObjArgs(
          fallback.get(), learned->python_plan.get(), learned->rule_and_rows.get(), py_numbers.get(), py_segment.get(),
          py_label.get(), py_mask.get(), py_work.get(), py_values.get(), py_needs.get(), py_dy.get(), nullptr));
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

// --- entries: calls of a layer ---------------------------------------------------------------------------------------

// The tensors of a call: x, residual, weight, bias, weight2, bias2, mean and variance logits, segment, label, running
// mean and variance, batches, mask.
struct Inputs {
  std::array<Tensor, InputCount> tensors;
  Key key;
  const Tensor& operator[](size_t i) const { return tensors[i]; }
};

constexpr size_t Arguments = InputCount + 2;  // with momentum and eps

struct Entry {
  PyObject_HEAD
  vectorcallfunc call;
  int64_t branch;
  bool channels_last;
  std::array<double, 6> bounds;
  PyRef* rule_and_rows;
  std::vector<std::pair<Key, std::shared_ptr<const LearnedCall>>>* learned_calls;
};

// Whether `mask` is bool and has a value for each position of `x`: [N, *S] or [N, 1, *S].
bool is_mask_of(const Tensor& mask, const Tensor& x) {
  const int64_t between = mask.dim() - x.dim() + 1;  // 1 where it has an axis of channels
  if (mask.scalar_type() != at::kBool || between < 0 || between > 1 || mask.size(0) != x.size(0)) return false;
  if (between == 1 && mask.size(1) != 1) return false;
  for (int64_t axis = 2; axis < x.dim(); ++axis) {
    if (mask.size(axis - 1 + between) != x.size(axis)) return false;
  }
  return true;
}

// Read the tensors of a call. Returns false where Python has to serve it: the tensors must be plain, dense and on the
// device of x.
bool read_inputs(PyObject* const* args, const Entry& entry, Inputs& inputs) {
  static const uint64_t plain = c10::DispatchKeySet({
      c10::DispatchKey::CPU, c10::DispatchKey::CUDA, c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutogradCUDA,
      c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA}).raw_repr();
  auto& tensors = inputs.tensors;
  for (size_t i = 0; i < InputCount; ++i) {
    if (args[i] == Py_None) continue;
    if (!THPVariable_CheckExact(args[i])) return false;
    tensors[i] = THPVariable_Unpack(args[i]);
    if ((tensors[i].key_set().raw_repr() & ~plain) != 0) return false;
  }
  const Tensor& x = tensors[X];
  if (!x.defined() || x.dim() < 2) return false;
  if (!is_in_layout(x, entry.channels_last)) return false;
  const c10::Device device = x.device();
  for (size_t i = 0; i < InputCount; ++i) {
    const Tensor& t = tensors[i];
    inputs.key.types[i] = static_cast<uint8_t>((t.defined() ? t : x).scalar_type());
    if (!t.defined()) continue;
    if (t.device() != device || !(i == Residual ? t.sizes() == x.sizes() : i == X || t.is_contiguous())) return false;
    if (i == Label && (t.dim() != 1 || t.size(0) != x.size(0))) return false;
    if ((i == Weight || i == Bias) && t.numel() != x.size(1)) return false;
    if (i == Mask && !is_mask_of(t, x)) return false;
    if (i == Residual && !has_layout_of(t, x, entry.channels_last)) continue;  // it is copied, and the copy is aligned
    uint64_t address = reinterpret_cast<uint64_t>(t.const_data_ptr());
    if (i == Mean || i == Var) address += entry.branch * t.size(-1) * t.element_size();
    if (i == Batches) address += entry.branch * t.element_size();
    if ((address & 15) != 0) inputs.key.unaligned |= static_cast<uint16_t>(1U << i);
  }
  return true;
}

// False inside a transform of torch.func, forward-mode differentiation, a tracer, a mode that sees each operator, or a
// backward pass in which checkpointing reruns forward. Python serves all of these.
bool is_ordinary() {
  const auto included = c10::impl::tls_local_dispatch_key_set().included_;
  return !included.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) &&
         !included.has(c10::DispatchKey::Tracer) && !c10::impl::dispatch_mode_enabled() &&
         torch::autograd::get_current_graph_task_id() == -1 &&
         torch::autograd::ForwardADLevel::try_get_by_idx(0) == nullptr;
}

Tensor normalize(const Inputs& inputs, const Entry& entry, const std::shared_ptr<const LearnedCall>& learned,
                 const std::array<double, 8>& numbers) {
  const Plan& plan = *learned->plan;
  const Tensor& x = inputs[X];
  c10::OptionalDeviceGuard guard;
  if (plan.device >= 0) guard.reset_device(x.device());
  Tensor y, work;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    y = empty_as(x);
    work = plan.floats(plan.forward_floats, x);
    const Tensor partials = plan.partial_floats != 0 ? plan.floats(plan.partial_floats, x) : work;
    Tensor residual_like_x;
    if (inputs[Residual].defined()) residual_like_x = in_layout_of(inputs[Residual], x, plan.channels_last);
    std::array<Tensor, 17> tensors = {
        x, y, residual_like_x, work, partials, inputs[Weight], inputs[Bias], inputs[Weight2], inputs[Bias2],
        inputs[Segment], inputs[Label], inputs[MeanLogits], inputs[VarLogits], inputs[Mean], inputs[Var],
        inputs[Batches], inputs[Mask]};
    std::array<uint64_t, 17> offsets{};
    if (entry.branch != 0 && inputs[Mean].defined()) {
      for (size_t i = 13; i < 16; ++i) {  // the rows of the branch
        if (plan.device < 0) {
          tensors[i] = tensors[i].select(0, entry.branch);
        } else {
          const int64_t row_size = i == 15 ? 1 : tensors[i].size(-1);
          offsets[i] = entry.branch * row_size * tensors[i].element_size();
        }
      }
    }
    if (plan.device >= 0) driver.ensure_context(plan.device);
    for (const Launch& launch : *plan.launches[Plan::Forward].load(std::memory_order_acquire)) {
      run(launch, tensors.data(), tensors.size(), offsets.data(), numbers.data(), numbers.size(), work, plan.meet,
          plan.device);
    }
  }
  const bool recorded = torch::autograd::compute_requires_grad(
      inputs[X], inputs[Residual], inputs[Weight], inputs[Bias], inputs[Weight2], inputs[Bias2], inputs[MeanLogits],
      inputs[VarLogits]);
  if (recorded) {
    auto node = make_node<decltype(Edge::function)>();
    node->set_next_edges(torch::autograd::collect_next_edges(
        inputs[X], inputs[Residual], inputs[Weight], inputs[Bias], inputs[Weight2], inputs[Bias2], inputs[MeanLogits],
        inputs[VarLogits]));
    node->learned = learned;
    for (size_t i = 0; i < Differentiable; ++i) node->saved[i] = SavedVariable(inputs[i], false);
    node->saved_mask = SavedVariable(inputs[Mask], false);
    node->work = std::move(work);
    node->segment = inputs[Segment];
    node->label = inputs[Label];
    node->numbers = numbers;
    torch::autograd::set_history(y, node);
  }
  return y;
}

PyObject* entry_call(PyObject* self, PyObject* const* args, size_t flags, PyObject* names) {
  HANDLE_TH_ERRORS
  const auto& entry = *reinterpret_cast<Entry*>(self);
  TORCH_CHECK_TYPE(PyVectorcall_NARGS(flags) == Arguments && names == nullptr,
                   "an entry takes 14 tensors or None, a momentum and an epsilon");
  if (entry.learned_calls->empty() || !is_ordinary()) Py_RETURN_NONE;
  Inputs inputs;
  if (!read_inputs(args, entry, inputs)) Py_RETURN_NONE;
  const std::shared_ptr<const LearnedCall>* found = nullptr;
  for (const auto& [key, learned] : *entry.learned_calls) {
    if (key == inputs.key) found = &learned;
  }
  if (found == nullptr) Py_RETURN_NONE;
  const std::shared_ptr<const LearnedCall> learned = *found;
  std::array<double, 8> numbers;
  for (size_t i = 0; i < 2; ++i) {
    numbers[i] = PyFloat_AsDouble(args[InputCount + i]);
    if (numbers[i] == -1.0 && PyErr_Occurred() != nullptr) return nullptr;
  }
  std::copy(entry.bounds.begin(), entry.bounds.end(), numbers.begin() + 2);
  Tensor y;
  {
    const pybind11::gil_scoped_release release;
    y = normalize(inputs, entry, learned, numbers);
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
  long long forward = 0, backward = 0, partials = 0;
  int device = 0, channels_last = 0, reads = 0, residual = 0, has_inner = 0, meet = 0;
  if (PyArg_ParseTuple(args, "LLLippppp", &forward, &backward, &partials, &device, &channels_last, &reads,
                       &residual, &has_inner, &meet) == 0) {
    return nullptr;
  }
  Owned object = checked(type->tp_alloc(type, 0));
  auto plan = std::make_shared<Plan>();
  plan->forward_floats = forward;
  plan->backward_floats = backward;
  plan->partial_floats = partials;
  plan->device = device;
  plan->channels_last = channels_last != 0;
  plan->reads = reads != 0;
  plan->residual = residual != 0;
  plan->has_inner = has_inner != 0;
  plan->meet = meet != 0;
  reinterpret_cast<PlanObject*>(object.get())->plan = new std::shared_ptr<Plan>(std::move(plan));
  return object.release();
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
  std::vector<Launch> launches(PyList_GET_SIZE(list));
  for (size_t i = 0; i < launches.size(); ++i) {
    PyObject* item = PyList_GET_ITEM(list, static_cast<Py_ssize_t>(i));
    Launch& launch = launches[i];
    if (PyTuple_Check(item) == 0) {
      launch.callable = PyRef(item);
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
    TORCH_CHECK_VALUE(static_cast<size_t>(PyTuple_GET_SIZE(slots)) <= MaxParameters, "a kernel has at most ",
                      MaxParameters, " parameters here");
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(slots); ++k) {
      int kind = 0, index = 0;
      long long constant = 0;
      if (PyArg_ParseTuple(PyTuple_GET_ITEM(slots, k), "iiL", &kind, &index, &constant) == 0) throw_python_error();
      TORCH_CHECK_VALUE(index >= 0 && index < static_cast<int>(MaxTensors), "there is no tensor or number ", index);
      launch.slots.push_back({static_cast<Slot::Kind>(kind), index, constant});
    }
  }
  return launches;
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
    {"set", plan_set, METH_VARARGS,
     "Set the launches of a direction: forward (0), backward (1), backward of x alone (2), of parameters (3)."},
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
  int channels_last = 0;
  std::array<double, 6> b{};
  PyObject* rule_and_rows = nullptr;
  if (PyArg_ParseTuple(args, "Lp(dddddd)O", &branch, &channels_last, &b[0], &b[1], &b[2], &b[3], &b[4], &b[5],
                       &rule_and_rows) == 0) {
    return nullptr;
  }
  Owned object = checked(type->tp_alloc(type, 0));
  auto* entry = reinterpret_cast<Entry*>(object.get());
  entry->call = entry_call;
  entry->branch = branch;
  entry->channels_last = channels_last != 0;
  entry->bounds = b;
  entry->rule_and_rows = new PyRef(rule_and_rows);
  entry->learned_calls = new std::vector<std::pair<Key, std::shared_ptr<const LearnedCall>>>();
  return object.release();
  END_HANDLE_TH_ERRORS
}

void entry_dealloc(PyObject* self) {
  auto* entry = reinterpret_cast<Entry*>(self);
  delete entry->learned_calls;
  delete entry->rule_and_rows;
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// learn(plan, launch plan of Python, the 14 tensors): serve calls like this one from now on. Returns whether it will.
PyObject* entry_learn(PyObject* self, PyObject* const* args, Py_ssize_t number) {
  HANDLE_TH_ERRORS
  auto& entry = *reinterpret_cast<Entry*>(self);
  TORCH_CHECK_TYPE(number == 2 + InputCount && Py_TYPE(args[0]) == plan_type,
                   "learn takes a plan, Python's launch plan and 14 tensors");
  const auto& plan = *reinterpret_cast<PlanObject*>(args[0])->plan;
  Inputs inputs;
  if (plan->launches[Plan::Forward].load() == nullptr || entry.learned_calls->size() >= 64) Py_RETURN_FALSE;
  if (!read_inputs(args + 2, entry, inputs)) Py_RETURN_FALSE;
  for (const auto& [key, learned] : *entry.learned_calls) {
    if (key == inputs.key) Py_RETURN_TRUE;
  }
  auto learned = std::make_shared<LearnedCall>();
  learned->plan = plan;
  learned->python_plan = PyRef(args[1]);
  learned->rule_and_rows = PyRef(entry.rule_and_rows->get());
  learned->unaligned = inputs.key.unaligned;
  entry.learned_calls->emplace_back(inputs.key, std::move(learned));
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

// Launches that follow each other, for a `Stage` of launch.py.
struct Stage {
  PyObject_HEAD
  vectorcallfunc call;
  int device;
  std::vector<Launch>* launches;
};

// stage(tensors, numbers): two tuples. None stands for a missing tensor.
PyObject* stage_call(PyObject* self, PyObject* const* args, size_t flags, PyObject* names) {
  HANDLE_TH_ERRORS
  const auto& stage = *reinterpret_cast<Stage*>(self);
  TORCH_CHECK_TYPE(PyVectorcall_NARGS(flags) == 2 && names == nullptr && PyTuple_Check(args[0]) != 0 &&
                   PyTuple_Check(args[1]) != 0, "a stage takes a tuple of tensors or None, and one of numbers");
  const auto tensor_count = static_cast<size_t>(PyTuple_GET_SIZE(args[0]));
  const auto number_count = static_cast<size_t>(PyTuple_GET_SIZE(args[1]));
  std::array<Tensor, MaxTensors> tensors;
  std::array<double, MaxNumbers> numbers{};
  TORCH_CHECK_VALUE(tensor_count > 0 && tensor_count < MaxTensors && number_count <= numbers.size(),
                    "a stage takes at most ", MaxTensors - 1, " tensors and ", numbers.size(), " numbers");
  for (size_t i = 0; i < tensor_count; ++i) {
    PyObject* item = PyTuple_GET_ITEM(args[0], static_cast<Py_ssize_t>(i));
    if (item == Py_None) continue;
    TORCH_CHECK_TYPE(THPVariable_Check(item), "a stage takes tensors");
    tensors[i] = THPVariable_Unpack(item);
  }
  TORCH_CHECK_VALUE(tensors[0].defined(), "the first tensor of a stage must not be None");
  for (size_t i = 0; i < number_count; ++i) {
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
      run(launch, tensors.data(), tensor_count, nullptr, numbers.data(), number_count, tensors[0], true, stage.device);
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
  Owned object = checked(type->tp_alloc(type, 0));
  auto* stage = reinterpret_cast<Stage*>(object.get());
  stage->call = stage_call;
  stage->device = device;
  stage->launches = launches.release();
  return object.release();
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
  fallback = PyRef(callable);
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"open_driver", open_driver, METH_NOARGS, "Look up the CUDA driver. Returns the name of what is missing, or ''."},
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
