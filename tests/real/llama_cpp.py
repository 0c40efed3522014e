"""llama.cpp as the wheel `xllamacpp` has it: ids, greedy tokens and log-probabilities of a file."""

import json
import urllib.request

import numpy as np
import xllamacpp


class LlamaCpp:
    """A model in llama.cpp, on the CPU."""

    def __init__(self, path, context=512, threads=1):
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.n_ctx, params.n_parallel, params.warmup, params.verbosity = context, 1, False, 0
        params.n_gpu_layers = 0
        # By default keys and values are rounded to float16.
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.cache_ram_mib = 0
        self._server = xllamacpp.Server(params)

    def _post(self, path, fields):
        request = urllib.request.Request(
            self._server.listening_address + path,
            json.dumps(fields).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.loads(answer.read())

    def ids(self, text, begin=False):
        """Ids of a text, in which nothing is a special token."""
        fields = {"content": text, "add_special": begin, "parse_special": False}
        return self._post("/tokenize", fields)["tokens"]

    def complete(self, ids, count, probabilities=0):
        """The answer to a prompt of ids, which goes on greedily."""
        fields = {
            "prompt": list(map(int, ids)),
            "n_predict": count,
            "temperature": 0.0,
            "samplers": ["top_k"],
            "top_k": 1,
            "ignore_eos": False,
            "cache_prompt": False,
            "return_tokens": True,
            "n_probs": probabilities,
            "post_sampling_probs": False,
        }
        return self._post("/completion", fields)

    def greedy(self, ids, count):
        """(ids of the next tokens, text)"""
        answer = self.complete(ids, count)
        return answer["tokens"], answer["content"]

    def log_probabilities(self, ids, count):
        """(ids, float64 log-probabilities) of the most probable next tokens; none where the next
        token is an end or a part of a character, of which llama.cpp does not say them."""
        answer = self.complete(ids, 1, count).get("completion_probabilities")
        rows = answer[0]["top_logprobs"] if answer else []
        return np.array([row["id"] for row in rows], int), np.array(
            [row["logprob"] for row in rows]
        )

    def chat(self, messages, count):
        """The answer of the model in a conversation, by its own template."""
        fields = {"messages": messages, "max_tokens": count, "temperature": 0.0}
        answer = self._server.handle_chat_completions(fields)
        answer = json.loads(answer) if isinstance(answer, str | bytes) else answer
        return answer["choices"][0]["message"]["content"]
