"""How numba compiles the kernels, and where their code is kept: every one is decorated by `kernel`."""

import hashlib
import inspect
import sys
import uuid
from pathlib import Path

import numba
import numpy as np
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.dispatcher import Dispatcher
from numba.core.extending import _Intrinsic


class _Inlined(JITCodeLibrary):
    """The code of a function that only kernels call: it is copied into them, and never becomes machine code itself."""

    def _optimize_final_module(self):
        pass

    def _finalize_final_module(self):
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name):
        return 0  # as for any function without a wrapper for Python

    @property
    def codegen(self):
        return self  # numba tells it, through `set_env`, where the function's environment is; no code here looks for it

    def set_env(self, name, environment):
        pass


class _WithinCallers(Compiler):
    """numba's compiler for a function that is compiled only within those that call it, which is 1.7 times as fast.

    By default numba also optimises each function, with all that it calls, and makes machine code that nothing uses.
    """

    def define_pipelines(self):
        self.state.library = _Inlined(self.state.targetctx.codegen(), self.state.func_id.func_qualname)
        return super().define_pipelines()


def kernel(function=None, *, entry=False, parallel=False):
    """`numba.njit` as every kernel here uses it.

    entry: Python calls it, so the compiled code is kept on disk for the next process: next to the source file, else in
    NUMBA_CACHE_DIR or the user's cache folder, else nowhere. To see whether that code is stale, numba looks only at the
    file of the function itself; so the function's name includes a digest of everything that it is made of.
    """
    if function is None:
        return lambda f: kernel(f, entry=entry, parallel=parallel)
    options = {"error_model": "numpy", "nogil": True, "parallel": parallel}
    if not entry:
        alone = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "pipeline_class": _WithinCallers}
        return numba.njit(function, **alone, **options)
    function.__qualname__ += "_" + _digest(function)
    try:
        kept = numba.njit(function, cache=True, **options)
    except RuntimeError:  # no folder can be written to
        return numba.njit(function, **options)
    keep_apart(kept._cache._cache_file)
    return kept


def _digest(function):
    """A digest of the modules of a kernel and of those that it calls, and of the numbers that these modules import."""
    reached, waiting = {__name__}, [function.__module__]
    while waiting:
        module = waiting.pop()
        if module not in reached:
            reached.add(module)
            values = list(vars(sys.modules[module]).values())
            values += [each for value in values if inspect.ismodule(value) for each in vars(value).values()]
            waiting += [value.__module__ for value in values if isinstance(value, (Dispatcher, _Intrinsic))]
    digest = hashlib.blake2b(digest_size=4)
    for module in sorted(reached):
        names = vars(sys.modules[module])
        numbers = {name: value for name, value in names.items() if _is_number(value)}
        listed = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in numbers.items()}
        digest.update(repr((module, listed)).encode())
        path = Path(names.get("__file__", ""))
        digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()


def _is_number(value):
    if isinstance(value, tuple):
        return all(map(_is_number, value))
    return isinstance(value, (int, float, np.ndarray, np.generic))


def keep_apart(cache_file):
    """Give each compiled variant that numba keeps on disk a name of its own.

    numba numbers variants by an index that is not locked: two processes that add one at the same time give both the
    same name, and the one whose file was overwritten is then found with the machine code of the other.
    """
    base = cache_file._index_name.removesuffix(".nbi")
    cache_file._data_name = lambda number: f"{base}.{uuid.uuid4().hex}.nbc"
