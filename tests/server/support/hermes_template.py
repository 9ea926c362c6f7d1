"""A chat template with tools, of the public structure of Hermes 2 Pro's and 3's `tool_use`: written for the tests."""

from __future__ import annotations

HERMES_TOKENS = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")

# The macro branches on the values of a schema. A type that it does not know is a list to it, and it calls itself for
# each letter: for an unknown word without an end.
HERMES_TEMPLATE = """
{%- macro json_to_python_type(json_spec) %}
    {%- set basic_type_map = {"string": "str", "number": "float", "integer": "int", "boolean": "bool"} %}
    {%- if basic_type_map[json_spec.type] is defined %}
        {{- basic_type_map[json_spec.type] }}
    {%- elif json_spec.type == "array" %}
        {{- "list[" + json_to_python_type(json_spec["items"] or {}) + "]" }}
    {%- elif json_spec.type == "object" %}
        {%- if json_spec.additionalProperties is mapping %}
            {{- "dict[str, " + json_to_python_type(json_spec.additionalProperties) + "]" }}
        {%- else %}
            {{- "dict" }}
        {%- endif %}
    {%- elif json_spec.anyOf is defined %}
        {{- "Union[" }}
        {%- for option in json_spec.anyOf %}{{ json_to_python_type(option) + ("" if loop.last else ", ") }}{% endfor %}
        {{- "]" }}
    {%- elif json_spec.type is iterable %}
        {{- "Union[" }}
        {%- for t in json_spec.type %}
            {{- json_to_python_type({"type": t}) }}{{ "" if loop.last else "," }}
        {%- endfor %}
        {{- "]" }}
    {%- else %}
        {{- "Any" }}
    {%- endif %}
{%- endmacro %}
{{- bos_token }}
{%- if tools is iterable and tools | length > 0 %}
    {{- "<|im_start|>system\\nFunctions within <tools></tools>: <tools> " }}
    {%- for tool in tools %}
        {%- if tool.function is defined %}{% set tool = tool.function %}{% endif %}
        {{- '{"type": "function", "function": {"name": "' + tool.name + '", "description": "' + tool.name + '(' }}
        {%- for param_name, param_fields in tool.parameters.properties | items %}
            {{- param_name + ": " + json_to_python_type(param_fields) }}{{ "" if loop.last else ", " }}
        {%- endfor %}
        {{- ")" }}
        {%- if tool.return is defined %}{{ " -> " + json_to_python_type(tool.return) }}{% endif %}
        {{- " - " + (tool.description or "") + "\\n\\n" }}
        {%- for param_name, param_fields in tool.parameters.properties | items %}
            {%- if loop.first %}{{ "    Args:\\n" }}{% endif %}
            {{- "        " + param_name + "(" + json_to_python_type(param_fields) + "): " }}
            {{- (param_fields.description or "") | trim }}
        {%- endfor %}
        {{- '", "parameters": ' }}
        {%- if tool.parameters.properties | length == 0 %}{{ "{}" }}{% else %}{{ tool.parameters | tojson }}{% endif %}
        {{- "}}" }}{{ "" if loop.last else "\\n" }}
    {%- endfor %}
    {{- " </tools><|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role in ("user", "system") or (message.role == "assistant" and message.tool_calls is not defined) %}
        {{- "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" }}
    {%- elif message.role == "assistant" %}
        {{- "<|im_start|>" + message.role }}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{% set tool_call = tool_call.function %}{% endif %}
            {{- '\\n<tool_call>\\n{"name": "' ~ tool_call.name ~ '", "arguments": ' ~ (tool_call.arguments | tojson) }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- "<|im_end|>\\n" }}
    {%- elif message.role == "tool" %}
        {%- if loop.previtem and loop.previtem.role != "tool" %}{{ "<|im_start|>tool\\n" }}{% endif %}
        {{- '<tool_response>\\n{"name": "' ~ message.name ~ '", "content": ' ~ (message.content | tojson) }}
        {{- '}\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != "tool" %}{{ "<|im_end|>\\n" }}{% endif %}
    {%- else %}
        {{- raise_exception("There is no role " + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}
"""
