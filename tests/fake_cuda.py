"""A GPU that is not there: tensors with real values whose device is cuda:0, over a CPU build of torch.

Inside `fake_cuda()` CUDA is available, and

- operations on tensors of both devices, `.numpy()` of a CUDA tensor, and CPU tensors that a CUDA
  tensor indexes raise, as on a GPU;
- whatever makes the host wait for the GPU is counted by the line of rlflow, Megatron or Transformer
  Engine that asked (`Gpu.waits`).

Not pretended: kernels, memory, NCCL, CUDA graphs, more than one GPU. Autograd hands plain tensors to
backward passes, so there devices may mix, and only waits for tensors of the forward pass count.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

DEVICE = torch.device("cuda", 0)
PLACES = re.compile(r"/((?:rlflow|megatron|transformer_engine)/[^:]*)$")
"""Files whose lines waits are counted by."""
MOVED_OUT = "_left_the_gpu"
"""Mark of a parameter whose `data` was set to a CPU tensor: an object keeps its class."""
FREE_BYTES, TOTAL_BYTES = 64 << 20, 80 << 30


@dataclass
class Gpu:
    """What the fake saw. waits: (operation, "file:line") -> how often the host waited there."""

    waits: Counter[tuple[str, str]] = field(default_factory=Counter)
    pinned: list[Tensor] = field(default_factory=list)
    backends: list[str | None] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=lambda: [Stream()])

    @property
    def stream(self) -> Stream:
        """The current one."""
        return self.streams[-1]

    def wait(self, operation: str) -> None:
        self.waits[operation, _place()] += 1

    def pin(self, value: Tensor) -> Tensor:
        self.pinned.append(value)
        return value

    def is_pinned(self, value: Tensor) -> bool:
        start = value.untyped_storage().data_ptr()
        return any(start == held.untyped_storage().data_ptr() for held in self.pinned)


class CudaTensor(torch.Tensor):
    """A CPU tensor that says that it is on the GPU."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})


class _Everywhere(TorchFunctionMode):
    """Sees factories too, which have no tensor among their arguments."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})


@contextlib.contextmanager
def fake_cuda() -> Iterator[Gpu]:
    """Inside, this process has one GPU."""
    global _GPU
    _GPU = Gpu()
    with contextlib.ExitStack() as stack:
        for owner, name, value in _replacements():
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        torch.compiler.set_stance("force_eager")  # kernels are not what is pretended
        stack.callback(torch.compiler.set_stance, "default")
        stack.enter_context(_Everywhere())
        yield _GPU


# ---------------------------------------------------------------- one operation


def on_cuda(value: Any) -> bool:
    """Whether a tensor pretends to be on the GPU."""
    return isinstance(value, CudaTensor) and MOVED_OUT not in value.__dict__


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        if func in SPECIAL:
            return SPECIAL[func](func, args, kwargs)
        if "device" in kwargs or kwargs.get("pin_memory"):
            return _made(func, args, kwargs)
        tensors = list(_tensors((args, kwargs)))
        if not any(map(on_cuda, tensors)):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in INDEXING:
            _check_index(name, args)
        elif name not in MIXING and not _in_backward():
            _check_devices(name, tensors)
        if name in WAITING or (name == "where" and len(args) == 1):
            _GPU.wait(name)
        if "out_dtype" in kwargs:  # CPUs have products in the type of their factors only
            return _wrapped(_product_in(func, args, dict(kwargs)))
        result = func(*args, **kwargs)
        onto_cpu = name == "__setitem__" or (name == "out" and not on_cuda(kwargs.get("out")))
        return result if onto_cpu else _wrapped(result)


def _made(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a factory, or of an operation that is told its result's device."""
    options = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
    device = kwargs.get("device")
    if str(device) == "meta":
        return func(*args, **kwargs)
    result = func(*args, **options)
    if device is None and args and on_cuda(args[0]):
        return _wrapped(result)
    if _is_cuda(device):
        return _wrapped(result)
    return _GPU.pin(_plain(result)) if kwargs.get("pin_memory") else _plain(result)


def _check_devices(name: str, tensors: list[Tensor]) -> None:
    """Raises as torch does where tensors of both devices meet; single numbers may lie anywhere."""
    host = [value for value in tensors if not on_cuda(value) and value.dim() and value.numel()]
    host = [value for value in host if value.device.type == "cpu"]
    if host:
        shapes = [tuple(value.shape) for value in tensors if on_cuda(value)]
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {name} at {_place()} got cuda "
            f"{shapes[:3]} and cpu {[tuple(value.shape) for value in host][:3]}"
        )


def _check_index(name: str, args: tuple[Any, ...]) -> None:
    first, index = args[0], list(_tensors(args[1:2]))
    if on_cuda(first):
        if any(value.dtype is torch.bool for value in index):
            _GPU.wait("bool index")
        value = args[2] if name == "__setitem__" else None
        if index and isinstance(value, Tensor) and value.dim() and not on_cuda(value):
            raise RuntimeError(f"index_put_ of CPU values into a CUDA tensor at {_place()}")
    elif any(map(on_cuda, index)) and first.dim() and not _in_backward():
        raise RuntimeError(f"indices should be on the same device (cpu) at {_place()}")


def _product_in(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    dtype, out = kwargs.pop("out_dtype"), kwargs.pop("out", None)
    result = func(*(value.to(dtype) if isinstance(value, Tensor) else value for value in args))
    return result if out is None else out.copy_(result)


# ---------------------------------------------------------------- what has a meaning of its own


def _to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Tensor.to in each of its forms."""
    source, *rest = args
    like = next((value for value in rest if isinstance(value, Tensor)), kwargs.get("other"))
    devices = [value for value in (kwargs.get("device"), *rest) if _is_device(value)]
    dtypes = [value for value in (kwargs.get("dtype"), *rest) if isinstance(value, torch.dtype)]
    if like is not None:
        devices, dtypes = [DEVICE if on_cuda(like) else "cpu"], [like.dtype]
    if devices and str(devices[0]) == "meta":
        return func(*args, **kwargs)
    onto_cuda = _is_cuda(devices[0]) if devices else on_cuda(source)
    flags = [value for value in rest if isinstance(value, bool)]
    copy = kwargs.get("copy", flags[1] if len(flags) > 1 else False)
    moved = onto_cuda != on_cuda(source)
    if moved and not onto_cuda:
        _GPU.wait("to cpu")
    result = Tensor.to(source, dtypes[0] if dtypes else source.dtype, copy=copy)
    if moved and result.data_ptr() == source.data_ptr():
        result = result.clone()
    return _wrapped(result) if onto_cuda else _plain(result)


def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Tensor.copy_: between devices too, late where that was asked for, the host's memory is pinned,
    and the stream is not the first."""
    target, source = args[:2]
    if on_cuda(source) == on_cuda(target):
        return func(*args, **kwargs)
    late = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
    late = late and _GPU.is_pinned(target if on_cuda(source) else source)
    if on_cuda(source) and not late:
        _GPU.wait("copy to cpu")
    if not late or _GPU.stream is _GPU.streams[0]:
        return func(target, source)
    _GPU.stream.copies.append(lambda: _copy_now(target, source))
    return target


def _copy_now(target: Tensor, source: Tensor) -> None:
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        Tensor.copy_(target, source)


def _set_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`parameter.data = value`, which moves a parameter to the value's device."""
    target, value = args
    func(target, value)
    if on_cuda(value):
        _wrapped(target).__dict__.pop(MOVED_OUT, None)
    elif isinstance(target, CudaTensor):
        target.__dict__[MOVED_OUT] = True


def _set_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    target, value = args
    if value is not None and on_cuda(target) != on_cuda(value):
        raise RuntimeError(f"assigned grad has data located on a different device at {_place()}")
    func(target, value)


def _refuse_numpy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if on_cuda(args[0]):
        raise TypeError(
            f"can't convert cuda:0 device type tensor to numpy at {_place()}. Use Tensor.cpu() to "
            "copy the tensor to host memory first."
        )
    return func(*args, **kwargs)


def _pin(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    if on_cuda(args[0]):
        raise RuntimeError(
            "cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned"
        )
    return _GPU.pin(args[0].clone())


def _cpu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return _to(Tensor.to, (args[0], "cpu"), {})


def _type(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = func(*args, **kwargs)
    if not on_cuda(args[0]):
        return result
    return result.replace("torch.", "torch.cuda.") if isinstance(result, str) else _wrapped(result)


def _number(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if on_cuda(args[0]):
        _GPU.wait(func.__name__)
    return func(*args, **kwargs)


def _said(of_cuda: Any) -> Callable[..., Any]:
    return lambda func, args, kwargs: of_cuda if on_cuda(args[0]) else func(*args, **kwargs)


SPECIAL: dict[Any, Callable[..., Any]] = {
    Tensor.device.__get__: _said(DEVICE),
    Tensor.is_cuda.__get__: _said(True),
    Tensor.is_cpu.__get__: _said(False),
    Tensor.get_device: _said(0),
    Tensor.data.__set__: _set_data,
    Tensor.grad.__set__: _set_grad,
    Tensor.type: _type,
    Tensor.to: _to,
    Tensor.cpu: _cpu,
    Tensor.cuda: lambda func, args, kwargs: _to(Tensor.to, (args[0], DEVICE), {}),
    Tensor.copy_: _copy,
    Tensor.pin_memory: _pin,
    Tensor.is_pinned: lambda func, args, kwargs: _GPU.is_pinned(args[0]),
    Tensor.numpy: _refuse_numpy,
    Tensor.__array__: _refuse_numpy,
    **dict.fromkeys(
        (Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__int__, Tensor.__float__), _number
    ),
    Tensor.__index__: _number,
    torch.device: lambda func, args, kwargs: (
        func("cuda", *args) if _is_number(args) else func(*args, **kwargs)
    ),
}
INDEXING = {"__getitem__", "__setitem__", "index_select", "gather", "take"}
MIXING = {
    "_has_compatible_shallow_copy_type",
    "register_hook",
    "result_type",
    "__set__",
    "__delete__",
    "is_set_to",
    "set_",
}
WAITING = {"nonzero", "unique", "masked_select", "equal", "allclose", "bincount"}


def _is_number(args: tuple[Any, ...]) -> bool:
    return len(args) == 1 and type(args[0]) is int


def _is_device(value: Any) -> bool:
    if isinstance(value, str):
        return value.split(":")[0] in ("cuda", "cpu", "meta")
    return isinstance(value, torch.device) or type(value) is int


def _is_cuda(device: Any) -> bool:
    return type(device) is int or str(device).startswith("cuda")


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _tensors(entry)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _wrapped(value: Any) -> Any:
    """The same tensors, now on the GPU. Their class is changed: autograd would see another tensor
    in a new one, and hooks on gradients of the old would never run."""
    if isinstance(value, Tensor):
        if not isinstance(value, CudaTensor):
            is_parameter = isinstance(value, torch.nn.Parameter)
            value.__class__ = CudaTensor
            value._is_param = is_parameter
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_wrapped, value))
    if type(value) in (list, tuple):
        return type(value)(map(_wrapped, value))
    if type(value).__module__ == "torch.return_types":
        return type(value)(list(map(_wrapped, value)))
    return value


def _plain(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, CudaTensor) else value


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _place() -> str:
    """file:line of the nearest caller that is counted."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        found = PLACES.search(frame.f_code.co_filename)
        if found:
            return f"{found[1]}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


# ---------------------------------------------------------------- torch.cuda


class Stream:
    """A queue of copies that are not made before somebody waits for them: the latest moment that a
    GPU could choose. All else is done at once."""

    cuda_stream, device = 0, DEVICE

    def __init__(self, *_: Any, **__: Any) -> None:
        self.copies: list[Callable[[], Any]] = []

    def __enter__(self) -> Stream:
        _GPU.streams.append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        _GPU.streams.pop()

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_stream(self, other: Stream) -> None:
        other.run(len(other.copies))

    def wait_event(self, event: Event) -> None:
        event.run()

    def synchronize(self) -> None:
        _GPU.wait("synchronize")
        self.run(len(self.copies))

    def query(self) -> bool:
        return not self.copies

    def run(self, count: int) -> None:
        for copy in self.copies[:count]:
            copy()
        del self.copies[:count]


class Event:
    """A place in a stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.run: Callable[[], None] = lambda: None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or _GPU.stream
        done, last = stream.copies, stream.copies[-1:]
        self.run = lambda: stream.run(done.index(last[0]) + 1 if last and last[0] in done else 0)

    def synchronize(self) -> None:
        _GPU.wait("synchronize")
        self.run()

    def wait(self, stream: Stream | None = None) -> None:
        self.run()

    def elapsed_time(self, _: Event) -> float:
        return 0.0


def _replacements() -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, value) of what stands in for torch.cuda."""
    properties = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=TOTAL_BYTES,
        multi_processor_count=132, uuid="GPU-fake",
    )  # fmt: skip
    answers = {
        "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0,
        "get_device_properties": properties, "get_device_capability": (9, 0),
        "get_device_name": properties.name, "get_arch_list": ["sm_90"], "memory_stats": {},
        "mem_get_info": (FREE_BYTES, TOTAL_BYTES), "is_current_stream_capturing": False,
        "is_bf16_supported": True,
        **dict.fromkeys(("set_device", "empty_cache", "_lazy_init", "init", "ipc_collect")),
        **dict.fromkeys(("set_stream", "reset_peak_memory_stats", "manual_seed_all")),
        **dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), 0),
        **dict.fromkeys(("memory_allocated", "memory_reserved"), 0),
    }  # fmt: skip
    for name, answer in answers.items():
        yield torch.cuda, name, lambda *_, answer=answer, **__: answer
    yield torch.cuda, "synchronize", lambda *_: _GPU.wait("synchronize")
    yield torch.cuda, "stream", lambda stream: stream or contextlib.nullcontext()
    yield torch.cuda, "current_stream", lambda *_: _GPU.stream
    yield torch.cuda, "default_stream", lambda *_: _GPU.streams[0]
    yield torch.cuda, "device", lambda *_: contextlib.nullcontext()
    yield torch.cuda, "Stream", Stream
    yield torch.cuda, "Event", Event
    yield torch.cuda, "_lazy_call", lambda call, **_: call()
    yield torch.cuda, "manual_seed", torch.manual_seed
    yield torch.cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state()
    yield torch.cuda, "set_rng_state", lambda state, *_: torch.set_rng_state(state)
    yield torch.cuda, "default_generators", (torch.default_generator,)
    yield torch.cuda.nvtx, "range_push", lambda *_: None
    yield torch.cuda.nvtx, "range_pop", lambda *_: None
    yield torch.Tensor, "record_stream", lambda *_: None
    yield torch.version, "cuda", "13.0"
    for name in ("getDevice", "setDevice", "exchangeDevice", "maybeExchangeDevice"):
        yield torch._C, f"_cuda_{name}", lambda *_: 0
    begin = torch.distributed.init_process_group

    def begin_over_gloo(backend: str | None = None, **options: Any) -> None:
        _GPU.backends.append(backend)
        options.pop("device_id", None)
        begin("gloo", **options)

    yield torch.distributed, "init_process_group", begin_over_gloo
    yield torch.autograd.Function, "apply", classmethod(_apply)
    yield BackwardCFunction, "apply", _backward


_REAL_APPLY: Any = torch.autograd.Function.__dict__["apply"].__func__
_REAL_BACKWARD: Any = BackwardCFunction.apply


def _backward(node: Any, *args: Any) -> Any:
    """A backward pass in Python, with layers that are computed again, looked at as all else is."""
    with torch._C._EnableTorchFunction(), _Everywhere():
        return _REAL_BACKWARD(node, *args)


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """autograd.Function.apply, whose results come out as plain tensors."""
    result = _REAL_APPLY(cls, *args, **kwargs)
    return _wrapped(result) if any(map(on_cuda, _tensors(args))) else result


_GPU = Gpu()
