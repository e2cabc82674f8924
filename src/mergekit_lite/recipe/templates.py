"""Chat templates, by the names that recipes use.

Each template follows the published description of its format.
"""

from __future__ import annotations

_CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""

_ALPACA = """\
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}
{{ message['content'] | trim + '\\n\\n' }}
{%- elif message['role'] == 'user' -%}
{{ '### Instruction:\\n' + message['content'] | trim + '\\n\\n' }}
{%- else -%}
{{ '### Response:\\n' + message['content'] | trim + eos_token + '\\n\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '### Response:\\n' }}
{%- endif -%}
"""

_LLAMA3 = """\
{{- bos_token -}}
{%- for message in messages -%}
{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' \
+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif -%}
"""

# the format has no system message: the system text begins the next user message
_MISTRAL = """\
{{- bos_token -}}
{%- set system = namespace(text='') -%}
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}
{%- set system.text = message['content'] | trim + '\\n\\n' -%}
{%- elif message['role'] == 'assistant' -%}
{{ ' ' + message['content'] | trim + eos_token }}
{%- else -%}
{{ '[INST] ' + system.text + message['content'] | trim + ' [/INST]' }}
{%- set system.text = '' -%}
{%- endif -%}
{%- endfor -%}
"""

_EXAONE = """\
{%- for message in messages -%}
{%- if loop.first and message['role'] != 'system' -%}
{{ '[|system|][|endofturn|]\\n' }}
{%- endif -%}
{{ '[|' + message['role'] + '|]' + message['content'] }}
{%- if message['role'] == 'user' -%}
{{ '\\n' }}
{%- else -%}
{{ '[|endofturn|]\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '[|assistant|]' }}
{%- endif -%}
"""

TEMPLATES = {
    "alpaca": _ALPACA,
    "chatml": _CHATML,
    "exaone": _EXAONE,
    "llama3": _LLAMA3,
    "mistral": _MISTRAL,
}
