"""All logits of a text from llama.cpp, by its C interface, which the wheel `xllamacpp` exports.

Its server says the probabilities of the next token alone.
"""

import ctypes
import time

import numpy as np
import xllamacpp

SIZE = 4096
"""Bytes that hold each struct of parameters; functions read those that they know."""

F32, F16 = 0, 1
"""Numbers of types of ggml."""


class _Batch(ctypes.Structure):
    """`llama_batch`."""

    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


class _ModelParams(ctypes.Structure):
    """`llama_model_params`, which has its defaults."""

    _fields_ = [("bytes", ctypes.c_byte * SIZE)]


class _ContextParams(ctypes.Structure):
    """`llama_context_params` up to the types of its caches."""

    _fields_ = [
        *[(n, ctypes.c_uint32) for n in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq")],
        *[(n, ctypes.c_uint32) for n in ("n_outputs_max", "n_outputs_max_per_seq")],
        *[(n, ctypes.c_int32) for n in ("n_threads", "n_threads_batch", "context", "rope")],
        *[(n, ctypes.c_int32) for n in ("pooling", "attention", "flash_attention")],
        *[(f"rope{number}", ctypes.c_float) for number in range(6)],
        *[("yarn_orig_ctx", ctypes.c_uint32), ("defrag", ctypes.c_float)],
        *[("eval", ctypes.c_void_p), ("eval_data", ctypes.c_void_p)],
        *[("type_k", ctypes.c_int32), ("type_v", ctypes.c_int32)],
        ("rest", ctypes.c_byte * SIZE),
    ]


_Log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_SILENT = _Log(lambda level, text, data: None)


def _library():
    library = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
    pointer, integer = ctypes.c_void_p, ctypes.c_int32
    signatures = {
        "llama_model_default_params": (_ModelParams, ()),
        "llama_context_default_params": (_ContextParams, ()),
        "llama_model_load_from_file": (pointer, (ctypes.c_char_p, _ModelParams)),
        "llama_init_from_model": (pointer, (pointer, _ContextParams)),
        "llama_model_get_vocab": (pointer, (pointer,)),
        "llama_vocab_n_tokens": (integer, (pointer,)),
        "llama_batch_init": (_Batch, (integer, integer, integer)),
        "llama_batch_free": (None, (_Batch,)),
        "llama_decode": (integer, (pointer, _Batch)),
        "llama_get_logits": (ctypes.POINTER(ctypes.c_float), (pointer,)),
        "llama_get_memory": (pointer, (pointer,)),
        "llama_memory_clear": (None, (pointer, ctypes.c_bool)),
        "llama_log_set": (None, (_Log, pointer)),
        "llama_free": (None, (pointer,)),
        "llama_model_free": (None, (pointer,)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.llama_log_set(_SILENT, None)
    return library


class Logits:
    """A model in llama.cpp, on the CPU, that gives all its logits.

    Args:
      path: of a GGUF file.
      context: most tokens of a text.
      threads: of its products.
      exact: whether keys and values stay float32; by default llama.cpp rounds them to float16.
    """

    def __init__(self, path, context=512, threads=1, exact=False):
        self._library = library = _library()
        params = library.llama_context_default_params()
        if (params.n_ctx, params.n_batch, params.type_k, params.type_v) != (512, 2048, F16, F16):
            raise RuntimeError("llama.cpp has other parameters of a context than this file knows.")
        params.n_ctx = params.n_batch = params.n_ubatch = context
        params.n_threads = params.n_threads_batch = threads
        if exact:
            params.type_k = params.type_v = F32
            params.flash_attention = 0
        self._model = library.llama_model_load_from_file(
            str(path).encode(), library.llama_model_default_params()
        )
        self._context = library.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp does not load {path}.")
        self._vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model))
        self._batch = library.llama_batch_init(context, 0, 1)

    def __call__(self, ids, at_once=None):
        """Returns float32 [tokens, vocabulary]: the logits after each token of a text.

        Args:
          ids: of the file.
          at_once: tokens of a batch; all by default.
        """
        self._clear()
        ids, step = list(map(int, ids)), at_once or len(ids)
        batches = [ids[start : start + step] for start in range(0, len(ids), step)]
        return np.concatenate([self._decode(p, i * step, len(p)) for i, p in enumerate(batches)])

    def _clear(self):
        library = self._library
        library.llama_memory_clear(library.llama_get_memory(self._context), True)

    def _decode(self, ids, start, outputs):
        """Appends tokens; returns float32 [outputs, vocabulary], the logits after the last ones."""
        batch, library = self._batch, self._library
        batch.n_tokens = len(ids)
        for place, token in enumerate(ids):
            batch.token[place], batch.pos[place] = token, start + place
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
            batch.logits[place] = place >= len(ids) - outputs
        if library.llama_decode(self._context, batch):
            raise RuntimeError("llama.cpp does not decode a batch.")
        logits = library.llama_get_logits(self._context)
        return np.ctypeslib.as_array(logits, (outputs, self._vocabulary)).copy()

    def seconds(self, ids, count):
        """(seconds of a core of a prompt, the same of each token that goes on greedily)"""
        self._clear()
        start = time.process_time()
        last = self._decode(list(map(int, ids)), 0, 1)
        middle = time.process_time()
        for step in range(count):
            last = self._decode([int(last.argmax())], len(ids) + step, 1)
        return middle - start, (time.process_time() - middle) / count

    def self_difference(self, ids, count):
        """Returns the largest difference of the log-probabilities of the most probable next tokens
        between a prompt in one batch, and in batches of one token."""
        batch, single = (log_softmax(self(ids, at_once)[-1]) for at_once in (None, 1))
        return float(np.abs(batch - single)[np.argsort(-batch)[:count]].max())

    def loss(self, rows):
        """Returns the mean loss of texts of ids in nats a token, each without its first token."""
        return float(np.mean([_losses(self(row), row) for row in rows]))

    def close(self):
        """Frees the memory."""
        self._library.llama_batch_free(self._batch)
        self._library.llama_free(self._context)
        self._library.llama_model_free(self._model)


def log_softmax(logits):
    """Returns float64 log-probabilities of logits [..., vocabulary]."""
    logits = logits.astype(np.float64)
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def _losses(logits, ids):
    """Returns float64 [tokens - 1], the loss of each token after the first."""
    places = np.asarray(ids)[1:, None]
    return -np.take_along_axis(log_softmax(logits[:-1]), places, axis=1)[:, 0]
