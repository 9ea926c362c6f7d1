"""A chat template with tools, of the public structure of Llama 3.1's: written for the tests."""

from __future__ import annotations

TOOL_TEMPLATE = """
{{- bos_token }}
{%- if not tools_in_user_message is defined %}{% set tools_in_user_message = true %}{% endif %}
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- macro turn(role) %}{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}{% endmacro %}
{%- macro show(tools) %}{% for tool in tools %}{{ tool | tojson(indent=4) }}{{ '\n\n' }}{% endfor %}{% endmacro %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- turn('system') }}
{%- if builtin_tools is defined or tools is not none %}{{ 'Environment: ipython\n' }}{% endif %}
{%- if builtin_tools is defined %}{{ 'Tools: ' + builtin_tools | join(', ') + '\n' }}{% endif %}
{%- if documents %}
    {%- for document in documents %}{{ document.title + ': ' + document['text'] + '\n' }}{% endfor %}
{%- endif %}
{%- if tools is not none and not tools_in_user_message %}{{ show(tools) }}{% endif %}
{{- system_message }}{{ '<|eot_id|>' }}
{%- if tools_in_user_message and tools is not none %}
    {%- if messages | length != 0 %}
        {%- set first_user_message = messages[0]['content'] | trim %}
        {%- set messages = messages[1:] %}
    {%- else %}
        {{- raise_exception("There is no user message to put the tools into.") }}
    {%- endif %}
    {{- turn('user') }}{{ 'These functions can be called:\n\n' }}{{ show(tools) }}
    {{- first_user_message }}{{ '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role in ('ipython', 'tool') %}
        {{- turn('ipython') }}
        {%- if message.content is mapping or message.content is iterable %}{{ message.content | tojson }}
        {%- else %}{{ message.content }}{% endif %}
        {{- '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("There can be one tool call in a message.") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- turn('assistant') }}
        {%- if builtin_tools is defined and tool_call.name in builtin_tools %}
            {{- '<|python_tag|>' + tool_call.name + '.call(' }}
            {%- for name, value in tool_call.arguments | items %}
                {{- name + '="' + value + '"' }}{% if not loop.last %}{{ ', ' }}{% endif %}
            {%- endfor %}
            {{- ')<|eom_id|>' }}
        {%- else %}
            {{- '{"name": "' + tool_call.name + '", "parameters": ' + tool_call.arguments | tojson + '}<|eot_id|>' }}
        {%- endif %}
    {%- else %}
        {{- turn(message['role']) }}{{ message['content'] | trim }}{{ '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ turn('assistant') }}{% endif %}
"""
