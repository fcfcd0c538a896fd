"""What a model writes beside plain text: calls of tools and thoughts, by the conventions of its chat template.

`OutputFormat.of` finds the conventions, makes grammars for them, and makes parsers that split an answer as it comes.
"""
