"""A CUDA driver for machines without a GPU: XLA's GPU client runs on it, and kernels do nothing.

XLA compiles a step for an H100, makes its CUDA graph and updates it as on the chip. So XLA's log and the CPU time of a
call are those of the chip, without the time of the driver. Results are zeros. cuBLAS and cuDNN do not start, so all
products are Triton's.

The functions are those whose names are in jax's CUDA plug-in. Most return success and do nothing.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

from pallas_kernels.cpu.library import find_compiler
from scripts.flags.errors import FailedError

SOURCE = Path(__file__).with_suffix(".c")
LIBRARIES = ("libcuda.so.1", "libcudart.so.13", "libnvidia-ml.so.1")
_NAME = re.compile(rb"\0((?:cu|cuda|__cuda|nvml)[A-Z]\w{2,80})(?=\0)")
_NUMBERS = {  # written to the first argument
    "int": {
        "cuDriverGetVersion": "CUDA_VERSION", "cudaDriverGetVersion": "CUDA_VERSION",
        "cudaRuntimeGetVersion": "CUDA_VERSION", "cuDeviceGetCount": "1", "cudaGetDeviceCount": "1",
        "cuDeviceGet": "0", "cudaGetDevice": "0", "cuDeviceGetByPCIBusId": "0", "cuCtxGetDevice": "0",
        "cuCtxGetDevice_v2": "0", "cuCtxGetFlags": "0",
        "cuOccupancyMaxActiveBlocksPerMultiprocessor": "2",
        "cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags": "2",
        "cudaOccupancyMaxActiveBlocksPerMultiprocessor": "2",
        "cuOccupancyMaxPotentialClusterSize": "8", "cuOccupancyMaxActiveClusters": "16",
    },
    "size_t": {"cuDeviceTotalMem": "TOTAL_BYTES", "cuDeviceTotalMem_v2": "TOTAL_BYTES",
               "cuMemGetAllocationGranularity": "GRANULARITY", "cuMulticastGetGranularity": "GRANULARITY"},
    "void *": {"cuDevicePrimaryCtxRetain": "CONTEXT", "cuCtxGetCurrent": "CONTEXT", "cuCtxPopCurrent_v2": "CONTEXT"},
    "float": {"cuEventElapsedTime": "1", "cuEventElapsedTime_v2": "1"},
}  # fmt: skip
_SECOND = {  # to the second argument
    "int": {"cuGraphNodeGetType": "0", "cuStreamGetPriority": "0", "cuStreamGetDevice": "0"},
    "unsigned": {"cuCtxGetApiVersion": "CUDA_VERSION"},
    "uint64_t": {"cuCtxGetId": "1", "cuStreamGetId": "1"},
    "void *": {"cuStreamGetCtx": "CONTEXT", "cuStreamGetCtx_v2": "CONTEXT"},
}
_THIRD = {
    "size_t": {"cuGraphNodeGetDependencies": "0"},
    "uint64_t": {"cuMemPoolGetAttribute": "0"},
}
_HANDLES = re.compile(  # a new handle in the first argument
    r"cu(StreamCreate\w*|EventCreate|ModuleLoad\w+|ModuleGetFunction|LibraryLoadData|LibraryGet(Kernel|Module)"
    r"|KernelGetFunction|FuncGetModule|MemCreate|MemRetainAllocationHandle|DeviceGet(Default)?MemPool|MemPoolCreate"
    r"|GraphCreate|GraphClone|GraphInstantiate\w*|GraphAdd\w+|GraphConditionalHandleCreate|daGetFuncBySymbol)"
)
_NOT_SUPPORTED = 3  # what NVML's functions return, but for its start and end


def build(folder: Path) -> Path:
    """Compiles the driver into `folder`, which LD_LIBRARY_PATH then names first. Raises FailedError if jax's CUDA
    plug-in or a C compiler is missing."""
    found = importlib.util.find_spec("jax_plugins")
    places = [] if found is None else list(found.submodule_search_locations or [])
    plugin = next((path for place in places for path in Path(place).glob("xla_cuda*/xla_cuda_plugin.so")), None)
    if plugin is None:
        raise FailedError("jax's CUDA plug-in is not installed here: pip install -e '.[targets]'")
    try:
        compiler = find_compiler()
    except Exception as error:
        raise FailedError(str(error)) from error
    names = {name.decode() for name in _NAME.findall(plugin.read_bytes())}
    source, library = folder / "driver.c", folder / LIBRARIES[0]
    source.write_text(source_of(names))
    command = [compiler, "-w", "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl", "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise FailedError(f"the stand-in driver cannot be compiled: {done.stderr.strip()}")
    for name in LIBRARIES[1:]:
        (folder / name).symlink_to(library.name)
    return folder


def source_of(names: set[str]) -> str:
    """The C code of a driver with these functions and those that need more than a line."""
    begun = SOURCE.read_text()
    written = set(re.findall(r"^(?:int|const char \*) ?\*?(\w+)\(", begun, re.MULTILINE))
    lines = {
        name: f"int {name}({arguments}{kind} *value) {{ if (value) *value = {number}; return SUCCESS; }}"
        for arguments, table in (("", _NUMBERS), ("void *a, ", _SECOND), ("void *a, void *b, ", _THIRD))
        for kind, numbers in table.items()
        for name, number in numbers.items()
    }
    for name in sorted(names - lines.keys() - written):
        if _HANDLES.fullmatch(name):
            lines[name] = f"int {name}(void **handle) {{ *handle = new_handle(); return SUCCESS; }}"
        else:
            ready = not name.startswith("nvml") or name.startswith(("nvmlInit", "nvmlShutdown"))
            lines[name] = f"int {name}(void) {{ return {'SUCCESS' if ready else _NOT_SUPPORTED}; }}"
    return "\n".join([begun, *lines.values(), ""])
