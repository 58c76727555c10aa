"""Chat templates that write the same text as published ones, in our own words. Their output follows
the templates that TRL 1.16 and Axolotl 0.19 carry, and `loadtests.chat_templates` compares them:
Qwen2.5 and Qwen3 (Apache-2.0), Llama 3.1 (Llama licence), Mistral v3 (Apache-2.0) and Gemma
(Gemma terms). SmolLM2 and TinyLlama are in neither: theirs follow the ChatML and Zephyr
templates, under which they are published.
"""

from __future__ import annotations

TOOLS = r"""
{%- macro listed(tools) -%}
{{ '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' }}
{{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>' }}
{%- for tool in tools -%}{{ '\n' ~ tool | tojson }}{%- endfor -%}
{{ '\n</tools>\n\nFor each function call, return a json object with function name and ' }}
{{- 'arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n' }}
{{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' }}
{%- endmacro -%}
{%- macro called(m, first) -%}
{%- for c in m.tool_calls -%}
{{ '' if loop.first and first else '\n' }}
{{- '<tool_call>\n{"name": "' ~ c.function.name ~ '", "arguments": ' }}
{{- c.function.arguments | tojson ~ '}\n</tool_call>' }}
{%- endfor -%}
{%- endmacro -%}
{%- macro answered(m, opens, closes) -%}
{{ '<|im_start|>user' if opens }}
{{- '\n<tool_response>\n' ~ m.content ~ '\n</tool_response>' ~ ('<|im_end|>\n' if closes) }}
{%- endmacro -%}
"""

QWEN25 = (
    TOOLS
    + r"""
{%- set said = messages[0].content if messages[0].role == 'system' else 'You are helpful.' -%}
{{ '<|im_start|>system\n' ~ said ~ ('\n\n' ~ listed(tools) if tools) ~ '<|im_end|>\n' }}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{{ answered(m, loop.previtem.role != 'tool', loop.last or loop.nextitem.role != 'tool') }}
{%- elif m.role == 'assistant' and m.tool_calls -%}
{{ '<|im_start|>assistant' ~ ('\n' ~ m.content if m.content) ~ called(m, false) ~ '<|im_end|>\n' }}
{%- elif m.role != 'system' or not loop.first -%}
{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{{ '<|im_start|>assistant\n' if add_generation_prompt }}
"""
)

# Writes the reasoning of turns since the user's last message alone, and an empty one for a last
# turn that has none; `enable_thinking = false` begins the turn with an empty one.
QWEN3 = (
    TOOLS
    + r"""
{%- set system = messages[0].content ~ '\n\n' if messages[0].role == 'system' -%}
{%- if tools -%}{{ '<|im_start|>system\n' ~ (system or '') ~ listed(tools) ~ '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' -%}
{{ '<|im_start|>system\n' ~ messages[0].content ~ '<|im_end|>\n' }}
{%- endif -%}
{%- set ns = namespace(asked=0) -%}
{%- for m in messages if m.role == 'user' -%}{%- set ns.asked = messages.index(m) -%}{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{{ answered(m, loop.previtem.role != 'tool', loop.last or loop.nextitem.role != 'tool') }}
{%- elif m.role == 'assistant' -%}
{%- set reasons = m.reasoning_content or '' -%}
{{ '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.asked and (loop.last or reasons) -%}
{{ '<think>\n' ~ reasons ~ '\n</think>\n\n' }}
{%- endif -%}
{{ m.content ~ called(m, not m.content) ~ '<|im_end|>\n' }}
{%- elif m.role != 'system' or not loop.first -%}
{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\n' ~ ('<think>\n\n</think>\n\n' if enable_thinking is false) }}
{%- endif -%}
"""
)

# The date is an option or today's; tools stand in the first message of the user; one call a turn.
LLAMA3 = r"""
{{- bos_token -}}
{%- set day = date_string if date_string is defined else strftime_now('%d %b %Y') -%}
{%- macro turn(role, text) -%}
{{ '<|start_header_id|>' ~ role ~ '<|end_header_id|>\n\n' ~ text ~ '<|eot_id|>' }}
{%- endmacro -%}
{%- set system = messages[0].content | trim if messages[0].role == 'system' else '' -%}
{{ turn('system', ('Environment: ipython\n' if tools) ~ 'Today Date: ' ~ day ~ '\n\n' ~ system) }}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages -%}
{%- for m in rest -%}
{%- if m.role == 'user' and loop.first and tools -%}
{%- set form = 'Respond in the format {"name": function name, "parameters": {..}}.\n\n' -%}
{%- set told = namespace(text=form) -%}
{%- for tool in tools -%}
{%- set told.text = told.text ~ tool | tojson(indent=4) ~ '\n\n' -%}
{%- endfor -%}
{{ turn('user', told.text ~ m.content | trim) }}
{%- elif m.tool_calls is defined -%}
{%- if m.tool_calls | length != 1 -%}
{{ raise_exception('This model only supports single tool-calls at once!') }}
{%- endif -%}
{%- set call = m.tool_calls[0].function -%}
{%- set written = call.arguments | tojson -%}
{{ turn('assistant', '{"name": "' ~ call.name ~ '", "parameters": ' ~ written ~ '}') }}
{%- elif m.role == 'tool' -%}{{ turn('ipython', m.content | tojson) }}
{%- else -%}{{ turn(m.role, m.content | trim) }}
{%- endif -%}
{%- endfor -%}
{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' if add_generation_prompt }}
"""

# No start of the model's turn; tools and system message stand in the user's last message.
MISTRAL = r"""
{{- bos_token -}}
{%- set system = messages[0].content ~ '\n\n' if messages[0].role == 'system' else '' -%}
{%- set rest = messages[1:] if system else messages -%}
{%- set asked = rest | selectattr('role', 'equalto', 'user') | list -%}
{%- macro known(id) -%}
{%- if id | length != 9 -%}{{ raise_exception('Tool call IDs have a length of 9!') }}{%- endif -%}
{{ id }}
{%- endmacro -%}
{%- for m in rest -%}
{%- if m.role == 'user' -%}
{%- if tools and m == asked[-1] -%}
{{ '[AVAILABLE_TOOLS]' ~ tools | tojson ~ '[/AVAILABLE_TOOLS]' }}
{%- endif -%}
{{ '[INST]' ~ (system if loop.last) ~ m.content ~ '[/INST]' }}
{%- elif m.tool_calls -%}
{{ '[TOOL_CALLS][' }}
{%- for c in m.tool_calls -%}
{{ (c.function | tojson)[:-1] ~ ', "id": "' ~ known(c.id) ~ '"}' ~ (', ' if not loop.last) }}
{%- endfor -%}
{{ ']' ~ eos_token }}
{%- elif m.role == 'tool' -%}
{{ '[TOOL_RESULTS]{"content": ' ~ m.content ~ ', "call_id": "' ~ known(m.tool_call_id) }}
{{- '"}[/TOOL_RESULTS]' }}
{%- else -%}{{ m.content ~ eos_token }}
{%- endif -%}
{%- endfor -%}
"""

SMOLLM2 = r"""
{%- for m in messages -%}
{%- if loop.first and m.role != 'system' -%}
{{ '<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n' }}
{%- endif -%}
{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}
{%- endfor -%}
{{ '<|im_start|>assistant\n' if add_generation_prompt }}
"""

# Roles are plain text: only the end of a turn is a token.
TINYLLAMA = r"""
{%- for m in messages -%}
{{ '<|' ~ m.role ~ '|>\n' ~ m.content ~ eos_token ~ '\n' }}
{%- if loop.last and add_generation_prompt -%}{{ '<|assistant|>\n' }}{%- endif -%}
{%- endfor -%}
"""

GEMMA = r"""
{{- bos_token -}}
{%- for m in messages -%}
{%- if m.role == 'system' -%}{{ raise_exception('System role not supported') }}{%- endif -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Conversation roles must alternate') }}
{%- endif -%}
{%- generation -%}
{%- set role = 'model' if m.role == 'assistant' else m.role -%}
{{ '<start_of_turn>' ~ role ~ '\n' ~ m.content | trim ~ '<end_of_turn>\n' }}
{%- endgeneration -%}
{%- endfor -%}
{{ '<start_of_turn>model\n' if add_generation_prompt }}
"""

FORMATS = {
    "qwen2.5": QWEN25,
    "qwen3": QWEN3,
    "llama-3": LLAMA3,
    "mistral": MISTRAL,
    "smollm2": SMOLLM2,
    "tinyllama": TINYLLAMA,
    "gemma": GEMMA,
}
