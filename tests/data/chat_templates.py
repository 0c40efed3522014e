"""Chat templates in the shapes of public models', written for these tests, and conversations."""

_ENDS = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
_INST = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
)
TEMPLATES = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + "
    "'<|im_end|>' + '\n' }}{% endfor %}" + _ENDS,
    "chatml with a default system": "{% if messages[0].role != 'system' %}"
    "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}" + _ENDS,
    "chatml, last turn without a line break": "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}<|im_end|>{{ '\n' if not loop.last }}{% endfor %}" + _ENDS,
    "headers": "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + "
    "'<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}",
    "headers, always one more": "{% for m in messages %}{% set c = '<|start_header_id|>' + m.role "
    "+ '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set c = bos_token + c %}{% endif %}{{ c }}{% endfor %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}",
    "headers with a date if there is a clock": "{{ bos_token }}"
    "{% if strftime_now is defined and false %}{{ strftime_now('%d %b %Y') }}{% else %}"
    "{{ '26 Jul 2024' }}{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|e|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "inst": "{{ bos_token }}" + _INST + "{% if m.role == 'user' %}{{ '[INST] ' + m.content + "
    "' [/INST]' }}{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}",
    "inst with spaces": _INST + "{% if m.role == 'user' %}{{ bos_token + '[INST] ' + "
    "m.content.strip() + ' [/INST]' }}{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}"
    "{% endif %}{% endfor %}",
    "inst, only the last end": "{{ bos_token }}" + _INST + "{% if m.role == 'user' %}[INST]"
    "{{ m.content }}[/INST]{% else %}{{ m.content }}{{ eos_token if loop.last }}{% endif %}"
    "{% endfor %}",
    "turns": "{{ bos_token }}{% for m in messages %}{% set role = 'model' if m.role == 'assistant' "
    "else m.role %}{{ '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
    "bars": "{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>\n' + m.content + "
    "eos_token }}{% elif m.role == 'system' %}{{ '<|system|>\n' + m.content + eos_token }}"
    "{% elif m.role == 'assistant' %}{{ '<|assistant|>\n' + m.content + eos_token }}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}\n{% endfor %}",
    "bars with end": "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}"
    "{% endfor %}{{ '<|assistant|>\n' if add_generation_prompt else eos_token }}",
    "names": "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}"
    "{{ eos_token if m.role == 'assistant' }}\n{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}",
    "names on lines": "{%- for m in messages %}\n    {%- if m.role == 'user' %}\nHuman: "
    "{{ m.content }}\n    {%- else %}\nAssistant: {{ m.content }}\n    {%- endif %}\n"
    "{%- endfor %}\n{%- if add_generation_prompt %}\nAssistant:\n{%- endif %}",
    "instruction": "{% for m in messages %}{% if m.role == 'user' %}### Instruction:\n"
    "{{ m.content }}\n\n{% else %}### Response:\n{{ m.content }}\n{{ eos_token }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}### Response:\n{% endif %}",
    "tools if there are": "{% if tools is not none %}{{ '<tools>' + tools | tojson }}{% endif %}"
    "{% if documents %}{{ documents | tojson }}{% endif %}{% for m in messages %}<|im_start|>"
    "{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + _ENDS,
    "json": "{% for m in messages %}{{ m | tojson }}{{ '<|im_end|>' }}{% endfor %}",
    "json, indented": "{% for m in messages %}{{ [m.role, m.content] | tojson(indent=2) }}\n"
    "{% endfor %}",
    "generation tags": "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}" + _ENDS,
    "think in the prompt": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{% endif %}",
    "an empty thought in the last turn": "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}" + _ENDS,
    "thoughts of earlier turns dropped": "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if '</think>' in m.content and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}" + _ENDS,
    "macro and namespace": "{% macro turn(m) %}{{ '<|' ~ m.role ~ '|>' ~ m.content }}{% endmacro %}"
    "{% set state = namespace(count=0) %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% continue %}{% endif %}{% set state.count = state.count + 1 %}{{ turn(m) }}<|{{ state.count "
    "}}|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
}
"""Name of a shape -> its template."""

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}

TALKS = (
    [
        {"role": "user", "content": "what is two plus two?"},
        {"role": "assistant", "content": "four"},
    ],
    [
        {"role": "user", "content": 'if a < b & c: it\'s é "so"'},
        {"role": "assistant", "content": "Yes, <b>.\n\nAnd 猫."},
        {"role": "user", "content": "four?"},
        {"role": "assistant", "content": "four"},
    ],
    [
        {"role": "user", "content": "x = 12345\n    return"},
        {"role": "assistant", "content": "<think>\nshort\n</think>\n\nright"},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "<think>\nlonger\n</think>\n\nwrong"},
    ],
)
