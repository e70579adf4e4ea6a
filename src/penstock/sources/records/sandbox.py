"""Chat templates, which are programs of strangers, run with no way out and a bound on everything.

In: Jinja text as published with a tokenizer, and plain JSON data. Out: the rendered text, as `transformers` renders it
(same environment, same block rules, same filters). What differs:

* Only the filters, tests, methods and functions that templates of chat models use are there; no attribute leads out.
* A budget: every loop step, call, literal, joined string and output is paid for, so that loops inside loops, doubling
  strings and lists of lists end with `TemplateLimitError`. It grows with the input, not with the machine: the same
  template and record give the same result everywhere. A clock is the last resort.
* `strftime_now` gives `FIXED_DATE`: the same input must give the same tokens tomorrow.

A compiled template may be used by many threads. Rendering costs 50-200 µs for a short conversation.
"""

from __future__ import annotations

import datetime
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from penstock.errors import InputError

__all__ = ["FIXED_DATE", "CompiledTemplate", "TemplateFailedError", "TemplateLimitError", "compiled_template"]

FIXED_DATE = datetime.date(2024, 7, 26)
"""What Llama 3.1's own template falls back to, where a template asks for today."""

LARGEST_TEMPLATE = 128 * 2**10
LARGEST_RANGE = 10_000
LARGEST_NUMBER_BITS = 256
LARGEST_INDENT = 64
# Prices, in characters: about what the same time would copy, so that what a template may spend is a second or so.
STEP_COST = 16
MEMBER_COST = 8
CALL_COST = 64
SECONDS = 10.0

STRING_METHODS = frozenset(
    {
        "strip", "lstrip", "rstrip", "split", "rsplit", "splitlines", "startswith", "endswith", "upper", "lower",
        "title", "capitalize", "replace", "join", "find", "rfind", "index", "count", "isdigit", "isalpha", "isalnum",
        "isspace", "isupper", "islower", "removeprefix", "removesuffix", "partition", "rpartition", "format",
    }
)  # fmt: skip
CONTAINER_METHODS = frozenset(
    {
        "get", "items", "keys", "values", "copy", "index", "count",
    }
)  # fmt: skip
FILTERS = frozenset(
    {
        "abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "int", "items",
        "join", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "replace", "reverse",
        "safe", "select", "selectattr", "sort", "string", "title", "trim", "unique", "upper",
    }
)  # fmt: skip
PLAIN_FORMAT = re.compile(r"(?:[^%]|%[sdi%])*", re.DOTALL)
PLAIN_DATE_FORMAT = re.compile(r"(?:[^%]|%-?[A-Za-z%]){0,100}", re.DOTALL)


class TemplateFailedError(Exception):
    """A template refused a record (its own `raise_exception`) or failed on it."""


class TemplateLimitError(Exception):
    """A template asked for more than it may."""


class _Budget:
    """What is left of a rendering's allowance."""

    def __init__(self, limit: int) -> None:
        self.left = limit
        self._until = time.monotonic() + SECONDS
        self._payments = 0

    def pay(self, amount: int) -> None:
        self.left -= amount
        self._payments += 1
        if self.left < 0:
            raise TemplateLimitError("it does more work than its input explains (loops, calls or output)")
        if self._payments % 256 == 0 and time.monotonic() > self._until:
            raise TemplateLimitError(f"it takes longer than {SECONDS:.0f} s")

    def pay_for(self, value: Any) -> None:
        """Pays for everything inside a value; shared members count each time, because they are copied each time."""
        if isinstance(value, str):  # nearly always
            self.pay(1 + len(value))
            return
        waiting = [value]
        while waiting:
            item = waiting.pop()
            if isinstance(item, str):
                self.pay(1 + len(item))
            elif isinstance(item, dict):
                self.pay(MEMBER_COST)
                waiting += [*item.keys(), *item.values()]
            elif isinstance(item, list | tuple):
                self.pay(MEMBER_COST + len(item))
                waiting += item
            else:
                self.pay(MEMBER_COST)


_current = threading.local()


def _budget() -> _Budget:
    budget: _Budget = _current.budget
    return budget


class CompiledTemplate:
    """A template that is ready to render."""

    def __init__(self, template: Any, source: str, searched: tuple[str, ...]) -> None:
        self._template = template
        self.source = source
        self.searched = searched
        """String constants that the template looks for inside other strings."""
        self.has_generation_tags = re.search(r"\{%-?\s*generation\s*-?%\}", source) is not None
        self.has_generation_prompt = "add_generation_prompt" in source

    def render(self, variables: Mapping[str, Any], *, input_size: int, marks: tuple[str, str] = ("", "")) -> str:
        """The text of a conversation.

        Args:
            variables: what the template sees: `messages`, `tools`, `bos_token`…
            input_size: characters in them; what the template may do grows with it.
            marks: put around what stands between `{% generation %}` tags.

        Raises:
            TemplateFailedError: the template refused it, or failed.
            TemplateLimitError: it went beyond its bounds.
        """
        import jinja2

        num_messages = len(variables.get("messages") or ())
        _current.budget = _Budget(1_000_000 + 40 * input_size + 20 * len(self.source) * (1 + num_messages))
        try:
            text: str = self._template.render({**variables, "_generation_marks": marks})
        except TemplateLimitError:
            raise
        except jinja2.exceptions.SecurityError as error:
            raise TemplateLimitError(str(error)) from None
        except (MemoryError, RecursionError, OverflowError) as error:
            raise TemplateLimitError(f"{type(error).__name__}: {error}") from None
        except jinja2.exceptions.TemplateError as error:
            raise TemplateFailedError(str(error)) from None
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise TemplateFailedError(f"{type(error).__name__}: {error}") from None
        finally:
            del _current.budget
        return text


@lru_cache(maxsize=32)
def compiled_template(source: str, *, name: str) -> CompiledTemplate:
    """Compiles a template, once per process.

    Raises:
        InputError: it isn't one, or uses what isn't there.
    """
    import jinja2

    if len(source) > LARGEST_TEMPLATE:
        raise InputError(
            f"chat template {name!r} has {len(source):,} characters; at most {LARGEST_TEMPLATE:,} are taken",
            hint="name a built-in template with --template",
        )
    environment = _environment()
    try:
        tree = environment.parse(source)
        searched = _searched_strings(tree)
        return CompiledTemplate(environment.from_string(_priced(tree)), source, searched)
    except (jinja2.exceptions.TemplateError, SyntaxError, RecursionError, MemoryError, ValueError) as error:
        message = str(error).splitlines() or [type(error).__name__]
        raise InputError(
            f"chat template {name!r} can't be used: {message[0]}",
            hint="mend the template, or name a built-in one with --template",
        ) from None


def _environment() -> Any:
    """As `transformers.utils.chat_template_utils` sets it up, less what templates of chat models don't use."""
    import jinja2.ext
    from jinja2.exceptions import SecurityError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(["+", "*", "**", "%"])

        def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
            if not super().is_safe_attribute(obj, attr, value):
                return False
            if isinstance(obj, str):
                return attr in STRING_METHODS
            if isinstance(obj, dict | list | tuple):
                return attr in CONTAINER_METHODS
            return not isinstance(obj, int | float | range)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _check_operands(operator, left, right)
            return super().call_binop(context, operator, left, right)

        def wrap_str_format(self, value: Any) -> Any:
            wrapped = super().wrap_str_format(value)
            if wrapped is None:
                return None

            def plain_format(*args: Any, **kwargs: Any) -> Any:
                if any(mark in value.__self__ for mark in ":!"):
                    raise SecurityError("format strings with a width or conversion aren't taken")
                for _ in range(value.__self__.count("{")):
                    _budget().pay_for([args, kwargs])
                return wrapped(*args, **kwargs)

            return plain_format

        def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
            _pay_for_call(function, args, kwargs)
            return super().call(context, function, *args, **kwargs)

    environment = Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,  # nothing is worked out before there is a budget
        extensions=[_generation_extension(), jinja2.ext.loopcontrols],
        finalize=_paid_output(),
    )
    environment.globals = {
        "range": _bounded_range,
        "dict": _dictionary,
        "namespace": _namespace_class(),
        "raise_exception": _raise_exception,
        "strftime_now": _fixed_date,
    }
    environment.filters = {name: _paid_filter(environment.filters[name]) for name in FILTERS}
    environment.filters |= {
        "replace": _paid_replace(),
        "trim": _pass_context(_trim),
        "join": _paid_join(environment.filters["join"]),
    }
    environment.filters |= {"tojson": _pass_context(_tojson), "indent": _pass_context(_indent)}
    environment.filters |= {"_steps": _pass_context(_steps), "_paid": _pass_context(_paid)}
    environment.filters |= {"_concat": _pass_context(_concat), "_pay": _pass_context(_pay)}
    return environment


def _pass_context(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that is never run while the template is compiled: there is no budget then."""
    import jinja2

    def wrapped(context: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return jinja2.pass_context(wrapped)


def _paid_output() -> Callable[..., Any]:
    def output(value: Any) -> Any:
        _budget().pay_for(value)
        return value

    return _pass_context(output)


def _paid_filter(function: Any) -> Callable[..., Any]:
    """A filter that pays for what goes in. Those that need Jinja's own context get it."""
    import jinja2
    from jinja2.utils import _PassArg

    kind = _PassArg.from_obj(function)

    def wrapped(context: Any, *args: Any, **kwargs: Any) -> Any:
        _budget().pay_for([args, kwargs])
        if kind is _PassArg.context:
            return function(context, *args, **kwargs)
        if kind is _PassArg.eval_context:
            return function(context.eval_ctx, *args, **kwargs)
        if kind is _PassArg.environment:
            return function(context.environment, *args, **kwargs)
        return function(*args, **kwargs)

    return jinja2.pass_context(wrapped)


def _paid_replace() -> Callable[..., Any]:
    def replace(value: Any, old: str, new: str, count: int | None = None) -> str:
        text, old, new = str(value), str(old), str(new)
        _budget().pay(len(text) + text.count(old) * (1 + len(new)))
        return text.replace(old, new, -1 if count is None else count)

    return _pass_context(replace)


def _paid_join(join: Callable[..., Any]) -> Callable[..., Any]:
    import jinja2

    def wrapped(context: Any, value: Any, d: Any = "", attribute: Any = None) -> Any:
        items = list(value)
        _budget().pay_for(items)
        _budget().pay(len(items) * len(str(d)))
        return join(context, items, d, attribute)

    return jinja2.pass_context(wrapped)


def _trim(value: Any, chars: str | None = None) -> str:
    text = str(value)
    _budget().pay(len(text) + _strip_cost(text, chars))
    return text.strip(chars)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    width = len(indent) if isinstance(indent, str) else indent or 0
    if width > LARGEST_INDENT:
        raise TemplateLimitError(f"an indent of {width}; at most {LARGEST_INDENT} is taken")
    _budget().pay_for(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    margin = width if isinstance(width, str) else " " * min(width, LARGEST_INDENT + 1)
    if len(margin) > LARGEST_INDENT:
        raise TemplateLimitError(f"an indent of {width!r:.20}; at most {LARGEST_INDENT} is taken")
    lines = str(value).split("\n")
    _budget().pay(len(str(value)) + len(lines) * len(margin))
    indented = [margin + line if line or blank else line for line in lines[1:]]
    return "\n".join([margin + lines[0] if first else lines[0], *indented])


def _steps(items: Iterable[Any], cost: int) -> Any:
    """What a loop runs over; each step is paid for with what its body writes."""
    if isinstance(items, list | tuple | range | str | Mapping):
        _budget().pay((STEP_COST + cost) * len(items))
        return items  # as it is: loops ask for its length
    return _paid_steps(items, cost)


def _paid_steps(items: Iterable[Any], cost: int) -> Iterator[Any]:
    for item in items:
        _budget().pay(STEP_COST + cost)
        yield item


def _paid(value: Any) -> Any:
    _budget().pay_for(value)
    return value


def _pay(cost: int) -> None:
    _budget().pay(STEP_COST + cost)


def _concat(values: list[Any]) -> str:
    _budget().pay_for(values)
    return "".join(map(str, values))


def _check_operands(operator: str, left: Any, right: Any) -> None:
    """Refuses or pays before the operation, because what it makes may not fit."""
    if operator == "+" and isinstance(left, str) and isinstance(right, str):
        _budget().pay(len(left) + len(right))
    elif operator == "%" and isinstance(left, str):
        if not PLAIN_FORMAT.fullmatch(left):
            raise TemplateLimitError("format strings with a width aren't taken")
        for _ in range(1 + left.count("%")):
            _budget().pay_for([left, right])
    elif operator == "*" and any(isinstance(side, str | list | tuple) for side in (left, right)):
        sequence, times = (left, right) if isinstance(left, str | list | tuple) else (right, left)
        if isinstance(times, int) and times > 0:
            _budget().pay(len(sequence) * times)
            for _ in range(times if isinstance(sequence, list | tuple) else 1):
                _budget().pay_for(sequence)
    elif isinstance(left, str | list | tuple):
        _budget().pay_for([left, right])
    elif isinstance(left, int) and isinstance(right, int):
        factor = abs(right) if operator == "**" else 1
        if operator in ("**", "*") and (left.bit_length() + 1) * factor + right.bit_length() > LARGEST_NUMBER_BITS:
            raise TemplateLimitError(f"numbers of more than {LARGEST_NUMBER_BITS} bits aren't taken")
    else:
        _budget().pay(1)


def _pay_for_call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    owner = getattr(function, "__self__", None)
    kwargs = {name: value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars", "caller")}
    _budget().pay(CALL_COST)
    _budget().pay_for([args, kwargs])
    if isinstance(owner, str):
        _budget().pay(len(owner))
        if function.__name__ == "replace" and len(args) > 1 and all(isinstance(word, str) for word in args[:2]):
            _budget().pay(owner.count(args[0]) * len(args[1]))
        elif function.__name__ == "join" and args and hasattr(args[0], "__len__"):
            _budget().pay(len(owner) * len(args[0]))
        elif function.__name__.endswith("strip") and args:
            _budget().pay(_strip_cost(owner, args[0]))


def _strip_cost(text: str, characters: Any) -> int:
    """Each character that goes is looked for among all of them."""
    return len(text) * len(characters) // 32 if isinstance(characters, str) else 0


def _bounded_range(*args: Any) -> range:
    numbers = range(*args)
    if len(numbers) > LARGEST_RANGE:
        raise TemplateLimitError(f"a range of {len(numbers)}; at most {LARGEST_RANGE} is taken")
    return numbers


def _dictionary(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: Any) -> None:
    import jinja2

    raise jinja2.exceptions.TemplateError(str(message))


def _fixed_date(format: str) -> str:  # noqa: A002  templates may name it
    if not PLAIN_DATE_FORMAT.fullmatch(format):
        raise TemplateLimitError(f"date format {format[:40]!r} isn't taken")
    return FIXED_DATE.strftime(format)


def _namespace_class() -> type:
    from jinja2.exceptions import SecurityError
    from jinja2.utils import Namespace

    class TemplateNamespace(Namespace):
        """Takes no names that begin with an underscore: they are Python's own."""

        def __init__(*args: Any, **kwargs: Any) -> None:  # as Jinja's: `self` may be a keyword
            self, args = args[0], args[1:]
            attributes = dict(*args, **kwargs)
            for name in attributes:
                _check_name(name)
            Namespace.__init__(self, attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            _check_name(name)
            _budget().pay_for(value)
            super().__setitem__(name, value)

    def _check_name(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace can't hold {name!r}")

    return TemplateNamespace


def _generation_extension() -> type:
    """`{% generation %}…{% endgeneration %}`, as `transformers` has it: says what the assistant says."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012  Jinja's own type

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("marked", [nodes.ContextReference()])
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def marked(self, context: Any, caller: Any) -> str:
            begin, end = context.resolve("_generation_marks")
            said: str = caller()
            _budget().pay_for(said)
            return f"{begin}{said}{end}"

    return Generation


def _priced(tree: Any) -> Any:
    """The template with a price on whatever can repeat or grow."""
    from jinja2 import nodes
    from jinja2.visitor import NodeTransformer

    def filtered(node: Any, name: str, *args: int) -> Any:
        constants = [nodes.Const(argument) for argument in args]
        return nodes.Filter(node, name, constants, [], None, None).set_lineno(node.lineno)

    def written(body: list[Any]) -> int:
        return sum(len(data.data) for node in body for data in _data_of(node))

    class Pricing(NodeTransformer):
        def visit_For(self, node: Any) -> Any:  # noqa: N802  named by Jinja
            cost = written(node.body)
            node = self.generic_visit(node)
            node.iter = filtered(node.iter, "_steps", cost)
            if node.recursive:  # entered again by loop(…), past the line above
                node.body.insert(0, self._payment(node, cost))
            return node

        def visit_Macro(self, node: Any) -> Any:  # noqa: N802
            cost = written(node.body)
            node = self.generic_visit(node)
            node.body.insert(0, self._payment(node, cost))
            return node

        visit_CallBlock = visit_Macro  # noqa: N815

        def _payment(self, node: Any, cost: int) -> Any:
            return nodes.ExprStmt(filtered(nodes.Const(cost).set_lineno(node.lineno), "_pay")).set_lineno(node.lineno)

        def visit_Concat(self, node: Any) -> Any:  # noqa: N802
            node = self.generic_visit(node)
            return filtered(nodes.List(node.nodes).set_lineno(node.lineno), "_concat")

        def visit_List(self, node: Any) -> Any:  # noqa: N802
            node = self.generic_visit(node)
            return filtered(node, "_paid") if node.items else node

        visit_Dict = visit_List  # noqa: N815

        def visit_Tuple(self, node: Any) -> Any:  # noqa: N802
            node = self.generic_visit(node)
            return filtered(node, "_paid") if node.ctx == "load" else node

        def visit_Getitem(self, node: Any) -> Any:  # noqa: N802
            node = self.generic_visit(node)
            return filtered(node, "_paid") if isinstance(node.arg, nodes.Slice) else node

    return Pricing().visit(tree)


def _data_of(node: Any) -> Iterator[Any]:
    """Literal text inside a node, loops and macros inside it apart: they pay for their own."""
    from jinja2 import nodes

    if isinstance(node, nodes.TemplateData):
        yield node
    elif not isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock):
        for child in node.iter_child_nodes():
            yield from _data_of(child)


def _searched_strings(tree: Any) -> tuple[str, ...]:
    """String constants given to methods and filters or looked for with `in`: where a template may cut content."""
    from jinja2 import nodes

    found: set[str] = set()
    for call in tree.find_all((nodes.Call, nodes.Filter)):
        if isinstance(call, nodes.Filter) or isinstance(call.node, nodes.Getattr):
            found |= {argument.value for argument in call.args if isinstance(argument, nodes.Const)}
    for compare in tree.find_all(nodes.Compare):
        if isinstance(compare.expr, nodes.Const) and any(part.op in ("in", "notin") for part in compare.ops):
            found.add(compare.expr.value)
    return tuple(sorted({text for text in found if isinstance(text, str) and text.strip()}, key=lambda t: (-len(t), t)))
