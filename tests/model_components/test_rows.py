"""The one reader of rows: every variant of a file reads alike in every package, and no row is lost
without a word."""

import gzip
import json

import datasets
import pandas
import pytest

from heads.pairwise import read_pairs
from kronecker import text_of
from mergekit_lite.masks import TextExamples
from model_components._rows import each_row, read_text
from tests.support.models import save_tokenizer

ROWS = [
    {"instruction": "w1 w2", "output": "w3", "prompt": "w1 w2", "a": "w3", "b": "w4"},
    {"instruction": "w5", "output": "w6\u2028w7, w8", "prompt": "w5", "a": "w6", "b": "w7"},
]
LINES = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\n"
LIST = json.dumps(ROWS)
CSV = pandas.DataFrame(ROWS).to_csv(index=False)
MARK = "\ufeff"
VARIANTS = {
    "lines.jsonl": LINES.encode(),
    "lines.json": LINES.encode(),
    "list.json": LIST.encode(),
    "list.jsonl": LIST.encode(),
    "indented.json": json.dumps(ROWS, indent=1).encode(),
    "lines.ndjson": LINES.encode(),
    "UPPER.JSONL": LINES.encode(),
    "blank.jsonl": LINES.replace("\n", "\n \n\n").encode(),
    "windows.jsonl": LINES.replace("\n", "\r\n").encode(),
    "unended.jsonl": LINES.rstrip().encode(),
    "mark.jsonl": (MARK + LINES).encode(),
    "mark.json": (MARK + LIST).encode(),
    "wide.jsonl": LINES.encode("utf-16"),
    "packed.jsonl.gz": gzip.compress(LINES.encode()),
    "packed.json.gz": gzip.compress((MARK + LIST).encode()),
    "commas.csv": CSV.encode(),
    "mark.csv": (MARK + CSV).encode(),
    "tabs.tsv": pandas.DataFrame(ROWS).to_csv(index=False, sep="\t").encode(),
    "packed.csv.gz": gzip.compress(CSV.encode()),
    "semicolons.csv": pandas.DataFrame(ROWS).to_csv(index=False, sep=";").encode(),
    "excel.csv": ("sep=;\n" + pandas.DataFrame(ROWS).to_csv(index=False, sep=";")).encode(),
    "columns.parquet": None,
    "data set": None,
    "data frame": None,
    "rows": None,
}


@pytest.fixture(params=VARIANTS)
def source(request, tmp_path):
    """The same rows, as each kind of source."""
    name = request.param
    if name == "data set":
        return datasets.Dataset.from_list(ROWS)
    if name == "data frame":
        return pandas.DataFrame(ROWS)
    if name == "rows":
        return iter(ROWS)
    path = tmp_path / name
    if name == "columns.parquet":
        pandas.DataFrame(ROWS).to_parquet(path)
    else:
        path.write_bytes(VARIANTS[name])
    return path


def test_pairwise_reads_it(source):
    pairs, report = read_pairs(source)
    assert pairs == read_pairs(ROWS)[0]
    assert (report.rows, report.kept) == (2, 2)


def test_lora_and_masks_read_it(source, tmp_path):
    transformers = pytest.importorskip("transformers")
    save_tokenizer(tmp_path, ["<unk>", *(f"w{i}" for i in range(9))])
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert TextExamples(source, tokenizer).examples == TextExamples(ROWS, tokenizer).examples


def test_kronecker_reads_it(source):
    if not hasattr(source, "read_text"):
        pytest.skip("text_of reads files")
    assert text_of(source) == "\n\n".join("\n".join(row.values()) for row in ROWS)


def test_a_line_that_is_no_row_stands_in_its_place(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"a": \n\n{"a": 3}\n')
    (_, first), (number, bad), (last, third) = each_row(tmp_path / "a.jsonl", "read")
    assert (first, number, last, third) == ({"a": 1}, 2, 4, {"a": 3})
    assert isinstance(bad, ValueError)
    (tmp_path / "b.jsonl").write_text('{"a": \n{"a": 3}\n')
    (_, bad), (_, good) = each_row(tmp_path / "b.jsonl", "read")
    assert isinstance(bad, ValueError)
    assert good == {"a": 3}
    (tmp_path / "a.csv").write_text("a,b\n1,2\n1,2,3\n")
    (_, good), (number, bad) = each_row(tmp_path / "a.csv", "read")
    assert good == {"a": "1", "b": "2"}
    assert number == 3
    assert "1 more fields than the header" in str(bad)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("open.csv", 'a,b\n1,2\n3,"4\n5,6\n', "unexpected end of data"),
        ("open.tsv", 'a\tb\n1\t"2\n3\t4"5\n', "expected after"),
        ("twice.csv", "a,b,a\n1,2,3\n", "two columns are called 'a'"),
    ],
)
def test_a_quote_swallows_no_rows_and_a_column_no_other(name, text, said, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=said):
        list(each_row(tmp_path / name, "read"))


def test_a_delimiter_is_one_that_makes_columns(tmp_path):
    (tmp_path / "a.tsv").write_text("prompt\ta, the first, of three\nq\tx\n")
    assert list(each_row(tmp_path / "a.tsv", "read")) == [
        (2, {"prompt": "q", "a, the first, of three": "x"})
    ]
    (tmp_path / "a.csv").write_text('"a,b,c";d\n1;2\n')
    assert list(each_row(tmp_path / "a.csv", "read")) == [(2, {"a,b,c": "1", "d": "2"})]


def test_files_as_excel_writes_them(tmp_path):
    (tmp_path / "a.csv").write_text("sep=\t\na\tb\n1\t2\n")
    assert list(each_row(tmp_path / "a.csv", "read")) == [(3, {"a": "1", "b": "2"})]
    (tmp_path / "a.csv").write_text("a,b,,\n1,2,,\n")
    ((_, row),) = each_row(tmp_path / "a.csv", "read")
    assert (row["a"], row["b"]) == ("1", "2")


def test_a_parquet_file_is_the_one_that_is_named(tmp_path):
    pandas.DataFrame({"a": ["wrong"]}).to_parquet(tmp_path / "rows1.parquet")
    pandas.DataFrame({"a": ["right"]}).to_parquet(tmp_path / "rows[1].parquet")
    assert list(each_row(tmp_path / "rows[1].parquet", "read")) == [(1, {"a": "right"})]
    (tmp_path / "no.parquet").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"read: .*no\.parquet cannot be read"):
        list(each_row(tmp_path / "no.parquet", "read"))


def test_numbers_are_no_text_in_any_format(tmp_path):
    rows = [{"id": 7, "text": "hello"}, {"id": 8, "text": "you"}]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    pandas.DataFrame(rows).to_csv(tmp_path / "a.csv", index=False)
    pandas.DataFrame(rows).to_parquet(tmp_path / "a.parquet")
    texts = {text_of(tmp_path / f"a.{suffix}") for suffix in ("json", "csv", "parquet")}
    assert texts == {"hello\n\nyou"}


def test_one_value_is_one_row(tmp_path):
    (tmp_path / "a.json").write_text('{\n "a": [1,\n 2]\n}')
    assert list(each_row(tmp_path / "a.json", "read")) == [(1, {"a": [1, 2]})]
    (tmp_path / "a.json").write_text("")
    assert list(each_row(tmp_path / "a.json", "read")) == []


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", b"[{]", r"read: .*a\.json cannot be read: invalid JSON"),
        ("a.json", b'[\n{"a": 1},\n{]', r"read: .*a\.json cannot be read: .*line 3"),
        ("a.json", b"[" * 10**5, r"read: .*a\.json cannot be read"),
        ("a.jsonl", b'{"a": "\xff"}', r"read: .*a\.jsonl cannot be read"),
        ("a.jsonl.gz", b"no", r"read: .*a\.jsonl\.gz cannot be read"),
        ("a.txt", b"x", r"read: expected a file of type \.json.*got .*a\.txt"),
        ("a.parquet.gz", b"x", r"read: expected a file of .*got .*a\.parquet\.gz"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(name, content, said, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=said):
        list(each_row(tmp_path / name, "read"))


def test_what_is_no_source_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"read: there is no file .*none\.jsonl"):
        list(each_row(tmp_path / "none.jsonl", "read"))
    for source in ({"train": []}, 3, None):
        with pytest.raises(ValueError, match="read: expected a file, a hub id or rows, got "):
            list(each_row(source, "read"))


def test_line_ends_of_windows_are_lines_in_a_text(tmp_path):
    (tmp_path / "text.txt").write_bytes(b"one\r\ntwo\r\n")
    assert read_text(tmp_path / "text.txt", "read") == "one\ntwo\n"
