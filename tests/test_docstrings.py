"""Every public name says what it takes, gives and refuses, and where it comes from."""

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import re
import textwrap

import pytest
from transformers import PreTrainedConfig

from mergekit_lite import METHODS

PACKAGES = (
    "mergekit_lite",
    "mergekit_lite.masks",
    "kronecker",
    "thinker",
    "heads.lora",
    "heads.pairwise",
)
SECTIONS = "Args|Attributes|Returns|Yields|Raises"
SHAPE = re.compile(
    r"\((\*B|[A-Z]\w*|r)(,| [A-Z])|shape|scalar|each element|for each term|sizes that broadcast"
)
PAPERS = {  # what has one, and words of it
    "mergekit_lite.extract_lora": "Eckart and Young, 1936",
    "mergekit_lite.masks.constraints.constrain": "2410.08371",
    "mergekit_lite.masks.masked_kl": "1503.02531",
    "mergekit_lite.masks.TaskMixture": "1910.10683",
    "kronecker.LowRankConfig": "2403.07378",
    "kronecker.kron_linear": "Van Loan",
    "kronecker.prune_": "2403.03853",
    "thinker.ThinkerConfig": "Hawthorne",
    "thinker.ThinkerTrainer": "Wang et al. 2025",
    "heads.lora.lora_linear": "2312.03415",
    "heads.pairwise.training.parameters.parameter_groups": "ULMFiT",
}
NAMES = {
    f"{package}.{name}": getattr(module, name)
    for package in PACKAGES
    for module in [importlib.import_module(package)]
    for name in module.__all__
    if inspect.isclass(getattr(module, name)) or inspect.isroutine(getattr(module, name))
}


def sections(thing):
    """The text of each section of a docstring, by its name."""
    parts = re.split(rf"^({SECTIONS}):\n", inspect.getdoc(thing) or "", flags=re.M)
    # a section ends where a line is not indented
    texts = [re.split(r"^(?=\S)", text, maxsplit=1, flags=re.M)[0] for text in parts[2::2]]
    return dict(zip(parts[1::2], texts, strict=True))


def documented(found):
    """The names that a section of names has."""
    text = found.get("Args", "") + found.get("Attributes", "")
    entries = re.findall(r"^    ([\w*`][\w*`, ]*):", text, re.M)
    return {name.strip(" *`") for entry in entries for name in entry.split(",")}


def constructor(kind):
    """The class of whose inputs a class speaks: the nearest one with an ``__init__`` of its own."""
    return next(c for c in kind.__mro__ if "__init__" in vars(c) or "__new__" in vars(c))


def inputs(thing):
    """The named inputs of a function, a class or a dataclass."""
    if (
        inspect.isclass(thing)
        and issubclass(thing, BaseException)
        and constructor(thing) is not thing
    ):
        return []
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    try:
        parameters = inspect.signature(thing).parameters.values()
    except ValueError:  # a class of C
        return []
    # fields of every model config, which are documented as **rest
    inherited = set()
    if inspect.isclass(thing) and issubclass(thing, PreTrainedConfig):
        inherited = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    return [
        p.name
        for p in parameters
        if p.kind not in kinds and p.name != "self" and p.name not in inherited
    ]


def raises(thing):
    """Whether a function's or a constructor's own lines raise."""
    bodies = (
        [thing]
        if inspect.isroutine(thing)
        else [vars(thing).get(n) for n in ("__init__", "__post_init__")]
    )
    bodies = [inspect.unwrap(b) for b in bodies if b is not None]
    if inspect.isclass(thing) and dataclasses.is_dataclass(thing):
        bodies = [b for b in bodies if b.__name__ == "__post_init__"]
    trees = [ast.parse(textwrap.dedent(inspect.getsource(b))) for b in bodies]
    return any(isinstance(node, ast.Raise) for tree in trees for node in lines_of(tree.body[0]))


def lines_of(node):
    """What is in a syntax tree, but for functions inside."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.Lambda)):
            yield child
            yield from lines_of(child)


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_says_what_it_takes(name):
    thing = NAMES[name]
    home = constructor(thing) if inspect.isclass(thing) else thing
    spoken = documented(sections(thing)) | documented(sections(home))
    if home.__module__.split(".")[0] in {p.split(".")[0] for p in PACKAGES}:
        assert set(inputs(thing)) <= spoken
    own = documented({"Args": sections(thing).get("Args", "")})
    parameters = inspect.signature(thing).parameters.values() if own else []
    if not any(p.kind == inspect.Parameter.VAR_KEYWORD for p in parameters):
        # **rest stands for the inherited fields of model configs
        assert own - {"rest"} <= {p.name for p in parameters}


@pytest.mark.parametrize("name", [n for n, thing in NAMES.items() if inspect.isroutine(thing)])
def test_a_public_function_says_what_it_gives(name):
    if inspect.signature(NAMES[name]).return_annotation not in (None, "None"):
        assert {"Returns", "Yields"} & set(sections(NAMES[name]))


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_says_what_it_refuses(name):
    if raises(NAMES[name]):
        assert "Raises" in sections(NAMES[name])


def tensors(thing):
    """The inputs that are tensors, and whether what a function returns is one."""
    function = thing if inspect.isroutine(thing) else vars(thing).get("__init__")
    if not inspect.isroutine(function):
        return [], False
    signature = inspect.signature(function)
    found = [
        p.name
        for p in signature.parameters.values()
        if re.match(r"(?!Callable).*\bTensor\b", str(p.annotation))
    ]
    return found, str(signature.return_annotation) == "Tensor"


@pytest.mark.parametrize("name", NAMES)
def test_tensors_have_shapes(name):
    found, result = tensors(NAMES[name])
    text = sections(NAMES[name])
    for tensor in found:
        entry = re.search(
            rf"^    (?:\w+, )*{tensor}(?:, \w+)*: (.*(?:\n        .*)*)", text["Args"], re.M
        )
        assert entry, tensor
        assert SHAPE.search(entry[1]), (tensor, entry[1])
    assert not result or SHAPE.search(text["Returns"])


@pytest.mark.parametrize("name", [name for name in METHODS if name != "passthrough"])
def test_every_merge_method_names_its_source(name):
    assert re.search(r"Source: .{10}", METHODS[name].function.__doc__)


@pytest.mark.parametrize("name", PAPERS)
def test_what_a_paper_proposed_names_it(name):
    assert PAPERS[name] in " ".join(pkgutil.resolve_name(name).__doc__.split())
