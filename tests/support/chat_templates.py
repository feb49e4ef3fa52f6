"""Short chat templates with the peculiar logic of published ones: what they change, leave out and refuse."""

from __future__ import annotations

QWEN3 = r"""
{%- if tools %}{{- '<|im_start|>system\n' }}{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- '<tools>' }}{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}{{- '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == 'user' and not message.content.startswith('<tool_response>') %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}{%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>assistant\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}{{- '<|im_start|>assistant\n' + content }}{%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{- '\n' }}{%- endif %}
            {%- set function = tool_call.function or tool_call %}
            {{- '<tool_call>\n{"name": "' + function.name + '", "arguments": ' }}
            {{- function.arguments if function.arguments is string else function.arguments | tojson }}{{- '}\n</tool_call>' }}
        {%- endfor %}{{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""
"""Qwen3: thoughts only after the last question, an empty thought in a last answer without one."""

DEEPSEEK_R1 = r"""{% set ns = namespace(system='') %}
{%- for message in messages %}{%- if message['role'] == 'system' %}{% set ns.system = message['content'] %}{%- endif %}{%- endfor %}
{{- bos_token }}{{ ns.system }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{- '<|User|>' + message['content'] }}{%- endif %}
    {%- if message['role'] == 'assistant' and message['content'] is not none %}{%- set content = message['content'] %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
        {{- '<|Assistant|>' + content + '<|end_of_sentence|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|><think>\n' }}{%- endif %}"""
"""Models distilled from DeepSeek R1: no thought in any answer, but one in the generation prompt; no tool calls."""

LLAMA31 = r"""{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = '26 Jul 2024' %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- '[system]\nToday Date: ' + date_string + '\n\n' + system + '<|im_end|>' }}
{%- if tools is not none %}
    {%- if messages | length == 0 %}{{- raise_exception('Cannot put tools in the first user message') }}{%- endif %}
    {{- '[user]\nGiven the following functions\n\n' }}{%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\n\n' }}{%- endfor %}
    {{- messages[0]['content'] | trim + '<|im_end|>' }}{%- set messages = messages[1:] %}{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '[' + message['role'] + ']\n' + message['content'] | trim + '<|im_end|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('only single tool-calls') }}{%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '[assistant]\n{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}{{- '}<|im_end|>' }}
    {%- else %}{{- '[ipython]\n' }}
        {{- message.content | tojson if message.content is mapping or message.content is iterable else message.content }}
        {{- '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '[assistant]\n' }}{%- endif %}"""
"""Llama 3.1: the tools in the first question, single tool calls without a text, trimmed texts, results as JSON."""

GEMMA = r"""{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}"""
"""Gemma: another name for the assistant, no system message."""

MISTRAL03 = r"""
{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- set user_messages = loop_messages | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message['role'] == 'user' %}
        {%- if tools is not none and message == user_messages[-1] %}
            {{- '[AVAILABLE_TOOLS] ' }}{{- tools | tojson }}{{- '[/AVAILABLE_TOOLS]' }}{%- endif %}
        {%- if loop.last and system is defined %}{{- '[INST] ' + system + '\n\n' + message['content'] + '[/INST]' }}
        {%- else %}{{- '[INST] ' + message['content'] + '[/INST]' }}{%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}{{- '[TOOL_CALLS] [' }}
        {%- for tool_call in message.tool_calls %}{%- set out = tool_call.function | tojson %}{{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id | length != 9 %}
                {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}{{- ', ' if not loop.last else ']<|im_end|>' }}
        {%- endfor %}
    {%- elif message['role'] == 'assistant' %}{{- ' ' + message['content'] | trim + '<|im_end|>' }}
    {%- elif message['role'] == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message['content'] | string + ', "call_id": "' + message.tool_call_id + '"}' }}
        {{- '[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception('Only user and assistant roles are supported') }}{%- endif %}
{%- endfor %}"""
"""Mistral 0.3: tools at the last question, identifiers of nine characters, a system message only in a prompt."""

PHI4 = r"""{% for message in messages %}
{{- '<|im_start|>' + message['role'] + '<|im_sep|>' + message['content'] + '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"""
"""Phi-4."""
PHI4_MINI = r"""{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"""
"""Phi-4-mini: a token at the end of every text that is no prompt."""

GLM4 = r"""[gMASK]<sop>{% for item in messages %}
{%- if item['tools'] is defined %}{{- '<|system|>\n' }}{% for tool in item['tools'] %}{{- tool | tojson }}{% endfor %}{% endif %}
{%- if item['content'] %}
    {{- '<|' + item['role'] + '|>' + item.get('metadata', '') + '\n' + item['content'] }}{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
"""GLM-4: no token at the end of an answer, tools in a message."""

SMOLLM3 = r"""{%- set enable_thinking = enable_thinking if enable_thinking is defined else true %}
{{- '<|im_start|>system\nToday: ' + strftime_now('%d %B %Y') + '\n' }}{{- '/think' if enable_thinking else '/no_think' }}
{%- if xml_tools %}{{- '\n<tools>' }}{%- for tool in xml_tools %}{{- tool | string }}{%- endfor %}{{- '</tools>' }}{%- endif %}
{{- '<|im_end|>\n' }}
{%- for message in messages %}{%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' %}
        {% generation %}
        {%- if enable_thinking %}{{- '<|im_start|>assistant\n' + content.lstrip('\n') + '<|im_end|>\n' }}
        {%- else %}{{- '<|im_start|>assistant\n<think>\n\n</think>\n' + content.lstrip('\n') + '<|im_end|>\n' }}{%- endif %}
        {% endgeneration %}
    {%- else %}{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
"""SmolLM3: `generation` blocks, the date, a flag for thoughts, tools under a name of its own."""
