"""The built-in functions of `kind: function` calls, by name. Knows their purpose; the runtime implements them."""

BUILTINS: dict[str, str] = {
    "exact_match": "1.0 where the text, without surrounding space, is the answer; keys: text, answer",
    "last_number": "1.0 where the last number in the text equals the answer's last number; keys: text, answer",
    "format_match": "1.0 where the text matches a regular expression; keys: text; args: pattern",
    "length": "number of characters of the text; keys: text",
}
