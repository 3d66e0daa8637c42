"""Views of tpplan's documents for people: on a terminal, as plain text, as SVG and as HTML.

Everything here reads JSON data as ``--json`` prints it, and nothing else.
"""
