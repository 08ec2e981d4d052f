"""Published shapes of tests for code, what they make of right and wrong programs, and tests that test nothing."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from typing import Any

import pytest

from tandem.reward.rules.code import unit_tests
from tandem.reward.rules.code_blocks import extract_code
from tandem.reward.rules.code_truth import CallTests, ProgramTests, SourceTests, read_tests
from tandem.sandbox.tests import same_output
from tests.sandboxes import sandboxed

SHOWN = [{"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}]
HIDDEN = [{"input": "[]\n0", "output": "0", "testtype": "functional"}]
PACKED = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(HIDDEN)))).decode()
CALLS = CallTests("f", [[[1, 2], 3], [[], 0]], [[6], [0]], "")
ONE_CALL = CallTests("f", [[[1, 2], 3]], [[6]], "")
PROGRAMS = ProgramTests(["1 2\n", "3 4\n"], ["3\n", "7\n"])
TABLE = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
CHECK = "def check(candidate):\n    assert candidate(1) == 2"
HUMANEVAL = {"prompt": 'import math\n\ndef f(x):\n    """Add one."""\n', "entry_point": "f", "test": CHECK}
LEETCODE = {
    "prompt": "import random\nfrom typing import *",
    "entry_point": "Solution().f",
    "test": CHECK,
    "input_output": [{"input": "x = 1", "output": "2"}],
}
PYTEST = "from solution import f\n\ndef test_f():\n    assert f(1) == 2"

SHAPES: dict[str, tuple[Any, Any]] = {
    "APPS, a program": (TABLE, PROGRAMS),
    "APPS, a row": ({"input_output": json.dumps(TABLE)}, PROGRAMS),
    "APPS, lines in lists": (
        {"inputs": [["2", "1 2"], ["3"]], "outputs": [["3"], ["7", "8"]]},
        ProgramTests(["2\n1 2", "3"], ["3", "7\n8"]),
    ),
    "numbers in the place of texts": ({"inputs": [1], "outputs": [[2, 0.5]]}, ProgramTests(["1"], ["2\n0.5"])),
    "APPS, a function": (
        {"fn_name": "f", "inputs": [[[1, 2], 3], [[], 0]], "outputs": [[6], [0]]},
        CallTests("f", [[[1, 2], 3], [[], 0]], [[[6], 6], [[0], 0]], ""),
    ),
    "a function that returns lists": (
        {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[6], [0, 1]]},
        CallTests("f", [[1], [2]], [[[6]], [[0, 1]]], ""),
    ),
    "verl, JSON one a line": (
        json.dumps({"fn_name": "f", "inputs": ["[1, 2]\n3", "[]\n0"], "outputs": ["6", "0"]}),
        CALLS,
    ),
    "JSON over several lines": ({"fn_name": "f", "inputs": ["[1,\n 2]\n3\n"], "outputs": ["6\n"]}, ONE_CALL),
    "LiveCodeBench, a row": (
        {
            "public_test_cases": json.dumps(SHOWN),
            "private_test_cases": PACKED,
            "metadata": json.dumps({"func_name": "f"}),
        },
        CALLS,
    ),
    "LiveCodeBench, a program": (
        {"public_test_cases": json.dumps([{"input": "1 2", "output": "3", "testtype": "stdin"}]), "metadata": "{}"},
        ProgramTests(["1 2"], ["3"]),
    ),
    "DeepCoder": (json.dumps([SHOWN[0] | {"metadata": {"func_name": "f"}}]), ONE_CALL),
    "CodeContests": (
        {
            "public_tests": {"input": ["1 2\n"], "output": ["3\n"]},
            "private_tests": {"input": [], "output": []},
            "generated_tests": {"input": ["3 4\n"], "output": ["7\n"]},
        },
        PROGRAMS,
    ),
    "Codeforces": ({"official_tests": [{"input": "1 2\n", "output": "3\n"}]}, ProgramTests(["1 2\n"], ["3\n"])),
    "SYNTHETIC-1, a program": (
        {"language": "python", "test_cases": [{"input": "1", "output": "2", "type": "stdin_stdout", "fn_name": None}]},
        ProgramTests(["1"], ["2"]),
    ),
    "SYNTHETIC-1, a function": (
        {"test_cases": [{"input": [[1, 2], 3], "output": 6, "type": "function_call", "fn_name": "f"}]},
        ONE_CALL,
    ),
    "one test as two texts": ({"input": "1", "output": "2"}, ProgramTests(["1"], ["2"])),
    "verl, assertions": (
        {"assert_case": ["assert f(1) == 2"], "inputs": [""], "outputs": [None]},
        SourceTests(["assert f(1) == 2"], ""),
    ),
    "MBPP, a row": (
        {"test_list": ["assert f(1) == 2"], "test_setup_code": "y = 1", "test_imports": ["import math"]},
        SourceTests(["import math\ny = 1\nassert f(1) == 2"], ""),
    ),
    "HumanEval, a row": (HUMANEVAL, SourceTests([f"{CHECK}\ncheck(f)"], "import math\n\n")),
    "LeetCode, a row": (LEETCODE, SourceTests([f"{CHECK}\ncheck(Solution().f)"], LEETCODE["prompt"])),
    "KodCode": (PYTEST, SourceTests([PYTEST], "")),
    "KodCode, a row": ({"test": PYTEST}, SourceTests([PYTEST], "")),
    "a list of tests": (["assert f(1) == 2"], SourceTests(["assert f(1) == 2"], "")),
    "one test": ({"tests": "assert f(1) == 2", "preamble": "x = 1"}, SourceTests(["assert f(1) == 2"], "x = 1")),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_published_shapes(shape: str) -> None:
    truth, expected = SHAPES[shape]
    made = read_tests(truth)
    assert type(made) is type(expected)
    assert {key: list(value) if key != "preamble" else value for key, value in vars(made).items()} == vars(expected) | {
        key: list(value) for key, value in vars(expected).items() if key != "preamble"
    }


NOTHING: list[tuple[Any, str]] = [
    (None, "holds no tests"),
    ([], "holds no tests"),
    ("", "holds no tests"),
    ("{}", "holds no tests"),
    ({"tests": []}, "holds no tests"),
    ({"inputs": [], "outputs": []}, "holds no tests"),
    (7, "the tests are 7"),
    ([7], "test 1 is 7, neither Python nor"),
    ({"inputs": ["1"], "outputs": []}, "no lists of the same length"),
    ({"inputs": ["1"]}, "no lists of the same length"),
    ({"inputs": "12", "outputs": ["1", "2"]}, "no lists of the same length"),
    ({"inputs": [""], "outputs": [""]}, "every expected output is empty"),
    ({"inputs": ["1", "2"], "outputs": [" ", "\n"]}, "every expected output is empty"),
    ({"inputs": ["1", ""], "outputs": ["1", ""]}, "test 2 has neither an input nor an output"),
    ({"inputs": [[1, [2]]], "outputs": ["3"]}, "the input of test 1 is .* neither text nor a list of lines"),
    ({"inputs": ["1"], "outputs": [True]}, "the output of test 1 is True, neither text"),
    ({"fn_name": "f", "inputs": [[1], [2]], "outputs": [None, None]}, "every test expects null of f"),
    ({"fn_name": "f", "inputs": [5], "outputs": [1]}, "the input of test 1 is 5, not the list of f's arguments"),
    ({"fn_name": "f", "inputs": ["x y"], "outputs": ["1"]}, "the input of test 1 is 'x y', not values of JSON"),
    ({"fn_name": "f", "inputs": ["1"], "outputs": ["1 2"]}, "the output of test 1 is '1 2', not 1 value of JSON"),
    ({"fn_name": "f(x)", "inputs": [[1]], "outputs": [1]}, "no name of a function"),
    ({"tests": [{"input": "1", "output": "2", "type": "function_call"}]}, "nothing names it; add fn_name"),
    ({"private_test_cases": "eJw"}, "private_test_cases 'eJw' cannot be unpacked"),
    (["assert f(1) == 2", {"input": "1", "output": "2"}], "tests of several kinds"),
    ([""], "test 1 tests nothing"),
    (["assert f(1) == 1", "# later"], "test 2 tests nothing"),
    (["assert True"], "test 1 tests nothing"),
    (["assert 1 == 1"], "test 1 tests nothing"),
    (["f(1) == 1"], "test 1 tests nothing"),
    (["print(f(1))"], "test 1 tests nothing"),
    (["from solution import assert_it\nassert_it(1)"], "test 1 tests nothing"),
    ("from solution import f\n\ndef test_f():\n    f(1)", "test 1 tests nothing"),
    ({"tests": ["check(f)"], "preamble": "def check(f):\n    f(1)"}, "test 1 tests nothing"),
    ("from solution import f\n\ndef test_f(tmp_path):\n    assert f(1) == 1", "nothing gives test_f its tmp_path"),
    (["assert f(1) =="], "cannot be read as Python: invalid syntax"),
    (["import pytest\nassert f(1) == 1"], "test 1 imports pytest, which the sandbox has not; name it in `packages`"),
]


@sandboxed
@pytest.mark.parametrize(("truth", "why"), NOTHING)
def test_tests_that_test_nothing_are_an_error(truth: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        unit_tests("x", "def f(x): return x", truth)


@sandboxed
@pytest.mark.parametrize(
    "test",
    [
        CHECK,
        f"{CHECK}\ncandidate = f",
        f"from solution import f\n{CHECK}",
        "class Check:\n    def test(self): assert f(1)",
        "for x in []: assert f(x)",
    ],
)
def test_a_test_that_asks_the_solution_for_nothing_is_an_error(test: str) -> None:
    with pytest.raises(ValueError, match="test 2 of the ground truth tests nothing: it ends well without having call"):
        unit_tests("x", "def f(x): return x", ["assert f(1) == 1", test])


def test_what_is_packed_may_make_nothing_but_data() -> None:
    hostile = base64.b64encode(zlib.compress(pickle.dumps(eval))).decode()
    with pytest.raises(ValueError, match=r"cannot be unpacked: it asks for builtins\.eval"):
        read_tests({"private_test_cases": hostile})


CLASS = """
class Solution:
    def f(self, words: List[str], k: Optional[int] = None) -> Dict[str, int]:
        found = defaultdict(int)
        for word in words: found[word] += 1
        heap = [(-n, w) for w, n in found.items()]
        heapify(heap)
        best = heapq.nsmallest(k or 1, heap) + list(accumulate([]))
        return [w for _, w in best if bisect_left([1], 1) == 0 and math.inf > 0 and pow(2, 3, 5) == 3]
"""
COUNTED = {"fn_name": "f", "inputs": ['["a", "b", "b"]\n1'], "outputs": ['["b"]']}


@sandboxed
def test_a_class_of_leetcode_finds_what_leetcode_gives_it() -> None:
    assert unit_tests("x", f"```python\n{CLASS}```", COUNTED)["reason"] is None
    by_source = {
        "prompt": "",
        "entry_point": "Solution().f",
        "test": CHECK.replace("(1) == 2", "(['a'], k=1) == ['a']"),
    }
    assert unit_tests("x", CLASS, by_source)["reason"] is None
    assert "defaultdict" in unit_tests("x", "def f(x): return defaultdict(int)", ["assert f(1) == {}"])["reason"]


@sandboxed
@pytest.mark.parametrize(
    "solution",
    [
        "",
        "class Solution: pass",
        "from math import *\ndel gcd",
        "import os; os._exit(0)",
        "raise SystemExit(0)",
        "def gcd(a, b): raise SystemExit(0)",
        "def gcd(a, b):\n    import os; os._exit(0)",
        "from unittest.mock import ANY\ndef gcd(a, b): return ANY",
        "class Any(int):\n    __eq__ = lambda self, other: True\ndef gcd(a, b): return Any()",
        "import json\njson.loads = json.dumps = lambda *a, **k: [1]\ndef gcd(a, b): return 1",
        "def same(*a): return True\ndef any(x): return True\ndef gcd(a, b): return 1",
        "import builtins\nbuiltins.any = builtins.abs = lambda x: 0\ndef gcd(a, b): return 1",
    ],
)  # fmt: skip
def test_wrong_functions_fail(solution: str) -> None:
    """The names that a solution need not import are not the solution's own."""
    assert unit_tests("x", solution, {"fn_name": "gcd", "inputs": [[4, 6]], "outputs": [2]})["score"] == 0.0


SUMS = [
    "import sys\nprint(sum(map(int, sys.stdin.readline().split())))",
    "import sys\nfor line in sys.stdin: print(sum(map(int, line[:-1].split())))",
    "import sys\ninput = sys.stdin.readline\ndef main():\n    a, b = map(int, input()[:-1].split())\n    print(a + b)\n"
    "if __name__ == '__main__':\n    main()",
    "print(sum(map(int, open(0).read().split())), end='')",
    "import os\nprint(sum(map(int, os.read(0, os.fstat(0).st_size).split())), ' \\n\\n')\nexit()",
    "import sys, threading\nsys.setrecursionlimit(10 ** 6)\nthreading.stack_size(1 << 27)\n"
    "def main(): print(sum(map(int, sys.stdin.buffer.read().split())))\n"
    "thread = threading.Thread(target=main)\nthread.start()\nthread.join()",
]


@sandboxed
@pytest.mark.parametrize("program", SUMS)
def test_right_programs_pass_however_they_read(program: str) -> None:
    assert unit_tests("x", program, {"inputs": [["1 2"]], "outputs": [["3"]]})["reason"] is None


@sandboxed
@pytest.mark.parametrize(
    "program",
    [
        "print(3)",
        "print('3\\n7')",
        "exit(0)",
        "import os\nprint(3, flush=True)\nos._exit(0)",
        "import sys\ntry: print(3)\nfinally: sys.exit(0)",
        "try: print(open('/tmp/output').read())\nexcept BaseException: print(3)",
        'print(\'["", ""]\')',
    ],
)
def test_wrong_programs_fail(program: str) -> None:
    verdict = unit_tests("x", program, TABLE)
    assert verdict["score"] == 0.0 and verdict["tests_passed"] <= 0.5


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("0.3333333333333333\n", "0.333333", True),
        ("0.3334", "0.333333", False),
        ("2.50", "2.5", True),
        (".5 5e-1", "0.5 0.50", True),
        ("-1e3", "-1000.0", True),
        ("1000001.0", "1000000.5", True),
        ("1000010", "1000000.5", False),
        ("3.0", "3", True),
        ("3.0000001", "3", False),
        ("1000000000000000001", "1000000000000000000", False),
        ("1e18", "1000000000000000000", True),
        ("07", "7", False),
        ("+7", "7", False),
        ("nan", "1.0", False),
        ("1e999", "1e998", False),
        ("1_0.0", "10.0", False),
        ("1.2.3", "1.2.30", False),
        ("Yes", "YES", False),
        ("1 2\n3", "1 2 3", False),
        (" a  b \r\n c\n\n", "a b\nc", True),
        ("\n\na", "a", True),
        ("a\n\nb", "a\nb", False),
        ("2 1", "1 2", False),
        ("", "", True),
    ],
)  # fmt: skip
def test_outputs_that_are_the_same(printed: str, expected: str, same: bool) -> None:
    assert same_output(printed, expected) is same


@sandboxed
def test_numbers_that_functions_return_are_compared_by_value() -> None:
    solution = "def f(x): return {'mean': [0.1 + 0.2, x], 'name': 'a'}"
    truth = {"fn_name": "f", "inputs": [[2]], "outputs": [{"mean": [0.3, 2], "name": "a"}]}
    assert unit_tests("x", solution, truth)["reason"] is None
    for changed in ("0.1 + 0.20001", "0.1 + 0.2, 9", "'0.3'"):
        assert unit_tests("x", solution.replace("0.1 + 0.2", changed), truth)["score"] == 0.0
    assert unit_tests("x", "def f(x): return 2.0000001", truth | {"outputs": [2]})["score"] == 0.0


@sandboxed
def test_keys_that_are_whole_numbers_are_numbers() -> None:
    truth = {"fn_name": "f", "inputs": [[{"1": 5, "-2": 6}, {"01": 7}]], "outputs": [{"1": 18}]}
    assert unit_tests("x", "def f(d, e): return {1: d[1] + d[-2] + e['01']}", truth)["reason"] is None


UNITTEST = """
import unittest
from solution import add

class AddTest(unittest.TestCase):
    def setUp(self): self.one = 1
    def test_add(self): self.assertEqual(add(self.one, 2), 3)

if __name__ == "__main__":
    unittest.main()
"""
BARE = UNITTEST.replace('if __name__ == "__main__":\n    ', "")
METHODS = """
from solution import add

def setup_module(module):
    global two
    two = 2

class TestNothing:
    def test_add(self): pass
    def other(self): raise AssertionError

class TestAdd(TestNothing):
    @classmethod
    def setup_class(cls): cls.three = 3
    def setup_method(self, method): self.one = 1
    @staticmethod
    def test_static(): pass
    class TestWithin:
        def test_within(self): assert add(1, two) == TestAdd.three
"""
REFUSED = """
import unittest
from solution import add

class AddTest(unittest.TestCase):
    def test_refused(self):
        with self.assertRaises(TypeError):
            add(None, 1)
        with self.assertRaises(TypeError):
            add(2, None)
"""
PARAMETRIZED = """
import pytest
from solution import add

@pytest.mark.parametrize("a, b", [(1, 2), pytest.param(0, 3)])
@pytest.mark.parametrize("c", [0])
def test_add(a, b, c):
    assert add(a, b) == 3 + c

def test_refused():
    with pytest.raises(TypeError):
        add(None, 1)

@pytest.mark.skip
def test_later():
    assert add(1, 1) == 3
"""
FUNCTIONS = """
from solution import add

def test_add():
    assert add(1, 2) == 3

async def test_later():
    assert add(2, 2) == 4

def test_pair(a, b):
    assert add(a, b) == 3

test_pair(0, 3)
"""
GUARDED = """
from solution import *
import solution

def test_add():
    assert add(1, 2) == solution.add(2, 1) == 3

if __name__ == "__main__":
    test_add()
"""


@sandboxed
@pytest.mark.parametrize("file", [UNITTEST, BARE, REFUSED, METHODS, PARAMETRIZED, FUNCTIONS, GUARDED])
def test_what_pytest_would_call_is_called(file: str) -> None:
    packages: dict[str, Any] = {"packages": ["pytest"]} if "pytest" in file else {}
    assert unit_tests("x", "def add(a, b): return a + b", file, **packages)["reason"] is None
    wrong = "def add(a, b):\n    if a is None: raise TypeError\n    return a * (b or 0) + 2"
    assert unit_tests("x", wrong, file, **packages)["score"] == 0.0
    skips = "import unittest\ndef add(a, b): raise unittest.SkipTest('later')"
    assert unit_tests("x", skips, file, **packages)["score"] == 0.0


DOCUMENTED = '''
def f():
    """
    ```
    f()
    ```
    """
'''


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("Here:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```py\nold = 1\n```\nbetter:\n```\nx = 1\n```", "x = 1\n"),
        ("<think>```python\nwrong\n```</think>```python\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1\n", "x = 1\n"),
        ("```python3\r\nx = 1\r\n```", "x = 1\r\n"),
        ("```Python title=a.py\nx = 1\n```", "x = 1\n"),
        ("~~~python\nx = 1\n~~~", "x = 1\n"),
        ("```cpp\nint x;\n```\nand\n```python\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1\n```\nIt prints\n```\n5\n[1, 2]\nYES\n```", "x = 1\n"),
        ("```python\nx = 1\n```\nRun\n```bash\npython x.py\n```\nIt prints\n```text\n5\n```", "x = 1\n"),
        ("```python\nx = 1\n```\nIt prints\n```\nx is 1!\n```", "x = 1\n"),
        ("```\nx = (\n```", "x = (\n"),
        ("```python\nx = 1```", "x = 1"),
        ('````python\nx = """\n```\n"""\n````', 'x = """\n```\n"""\n'),
        (f"```python{DOCUMENTED}```", DOCUMENTED.lstrip()),
        ("1. So:\n   ```python\n   x = 1\n   ```", "x = 1\n"),
        ("x = 1", "x = 1"),
        ("", ""),
    ],
)  # fmt: skip
def test_code_is_found(text: str, code: str) -> None:
    assert extract_code(text) == code
