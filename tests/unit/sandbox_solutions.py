"""Right solutions, and tests of theirs that do more than compare data: name -> (solution, test)."""

RIGHT = {
    "objects that the test makes": (
        """
class Pair:
    def __init__(self, a, b): self.a, self.b = a, b
def f(pairs): return sum(p.a * p.b for p in pairs)
""",
        """
p = Pair(1, 2)
p.b = 3
assert f([p, Pair(4, 5)]) == 23 and p.b == 3
""",
    ),
    "linked objects": (
        """
class Node:
    def __init__(self, x): self.x, self.left = x, None
def depth(n): return 0 if n is None else 1 + depth(n.left)
""",
        """
root = Node(1)
root.left = Node(2)
assert depth(root) == 2 and root.left.left is None and root.left is root.left
""",
    ),
    "objects that are compared": (
        """
from dataclasses import dataclass
@dataclass(order=True)
class P:
    x: int
def f(x): return P(x)
""",
        """
assert f(1) == P(1) and f(1) != P(2) and f(1) < P(2) and f(3).x == 3 and repr(f(1)) == 'P(x=1)'
""",
    ),
    "objects that are reckoned with": (
        """
class V:
    def __init__(self, x): self.x = x
    def __add__(self, o): return V(self.x + o.x)
    def __abs__(self): return abs(self.x)
    def __len__(self): return 3
    def __bool__(self): return self.x > 0
    def __getitem__(self, i): return i * 2
    def __call__(self, y): return self.x + y
""",
        """
v = V(2) + V(3)
assert v.x == 5 and abs(V(-4)) == 4 and len(v) == 3 and v and not V(0) and v[4] == 8 and v(1) == 6
""",
    ),
    "numbers of a class of its own": (
        """
class I(int): pass
from enum import IntEnum
class E(IntEnum): A = 1
def f(x): return I(x)
def g(): return E.A
""",
        """
assert f(3) == 3 and f(3) < 4 and f(3) + 1 == 4 and 2 * f(3) == 6 and abs(f(3) - 3.0) < 1e-9 and g() == 1
""",
    ),
    "generators": (
        """
def f(n):
    for i in range(n): yield i
""",
        """
assert list(f(1000)) == list(range(1000)) and sum(f(4)) == 6 and 2 in f(4) and next(f(3)) == 0
g = f(2)
assert [next(g), next(g), next(g, None)] == [0, 1, None]
""",
    ),
    "an endless generator": (
        """
def f():
    i = 0
    while True:
        yield i
        i += 1
""",
        """
import itertools
assert list(itertools.islice(f(), 3)) == [0, 1, 2]
""",
    ),
    "map, zip and views": (
        """
def f(d): return map(str, d)
def g(d): return d.items()
""",
        """
assert list(f([1, 2])) == ['1', '2'] and dict(g({1: 2})) == {1: 2} and sorted(g({2: 1})) == [(2, 1)]
""",
    ),
    "arguments changed in place": (
        """
def f(l, d=None, s=None):
    l.sort()
    if d is not None: d['x'] = l
    if s: s.add(9)
""",
        """
l, d, s = [3, 1], {}, {1}
assert f(l, d, s=s) is None and l == [1, 3] and d == {'x': [1, 3]} and s == {1, 9}
m = [[1, 2], [3, 4]]
f(m)
assert m == [[1, 2], [3, 4]]
""",
    ),
    "exceptions": (
        """
class Odd(ValueError): pass
def f(x):
    if x > 1: raise Odd('big', x)
    return [][x]
""",
        """
for error in (IndexError, Odd, ValueError):
    try:
        f(0 if error is IndexError else 5)
        assert False
    except error as e:
        assert error is IndexError or e.args == ('big', 5)
import unittest
with unittest.TestCase().assertRaises(Odd): f(2)
""",
    ),
    "functions of the test": (
        """
def f(g, xs): return [g(x) for x in xs]
def h(key): return sorted([3, 1, 2], key=key)
""",
        """
assert f(lambda x: x * x, [1, 2]) == [1, 4]
assert h(lambda x: -x) == [3, 2, 1]
assert f(str, [1]) == ['1']
assert f(len, ['ab']) == [2]
""",
    ),
    "functions that go round": (
        """
def f(g): return g
def twice(g): return lambda x: g(g(x))
""",
        """
k = lambda x: x + 1
assert f(k) is k and twice(k)(1) == 3 and twice(twice(k))(0) == 4
""",
    ),
    "iterators of the test": (
        """
def f(xs): return [x for x in xs]
""",
        """
assert f(iter([1, 2])) == [1, 2] and f(x for x in 'ab') == ['a', 'b'] and f(map(int, '12')) == [1, 2]
""",
    ),
    "what is printed": (
        """
def f(): print('hello')
""",
        """
import contextlib, io
with contextlib.redirect_stdout(io.StringIO()) as out: f()
assert out.getvalue() == 'hello\\n'
""",
    ),
    "a function that is called like a builtin": (
        """
def sum(a, b): return a + b
""",
        """
assert sum(10, 15) == 25
""",
    ),
    "a function that is called like a module": (
        """
def bisect(a): return a[0]
""",
        """
assert bisect([1]) == 1
""",
    ),
    "the solution as a module": (
        """
def f(): return 1
x = 2
""",
        """
import solution
from solution import f as g
assert solution.f() == g() == 1 and solution.x == 2 and not hasattr(solution, 'y')
""",
    ),
    "what the solution imports": (
        """
import math, os.path as p
from math import isclose
from collections import *
import sys
def f(): return 2.0
""",
        """
assert math.floor(2.5) == 2
assert isclose(f(), 2)
assert p.join('a', 'b') == 'a/b'
assert Counter('a') == {'a': 1}
assert sys.maxsize > 0
""",
    ),
    "data of many types": (
        """
from collections import *
from decimal import Decimal
from fractions import Fraction
import datetime as dt
P = namedtuple('P', 'x y')
DATA = [
    P(1, 2), Counter('aab'), deque([1], 3), OrderedDict(a=1), defaultdict(list, a=[1]), Decimal('1.10'), Fraction(1, 3),
    dt.date(2024, 1, 2), dt.timedelta(1, 2), 1 + 2j, b'x', bytearray(b'y'), range(3), {1, 2}, frozenset([1]),
    10 ** 100, -(2 ** 70), float('inf'), {(1, 2): [None, True]}, 'é\\ud800', int,
]
def f(i): return DATA[i]
""",
        """
from collections import *
from decimal import Decimal
from fractions import Fraction
import datetime as dt
expected = [
    (1, 2), Counter('aab'), deque([1], 3), OrderedDict(a=1), {'a': [1]}, Decimal('1.10'), Fraction(1, 3),
    dt.date(2024, 1, 2), dt.timedelta(1, 2), 1 + 2j, b'x', b'y', range(3), {1, 2}, frozenset([1]),
    10 ** 100, -(2 ** 70), float('inf'), {(1, 2): [None, True]}, 'é\\ud800', int,
]
for i, value in enumerate(expected): assert f(i) == value, i
assert f(0).y == 2 and f(0)._fields == ('x', 'y') and f(1).most_common(1) == [('a', 2)] and f(3)['a'] == 1
""",
    ),
    "not a number": (
        """
def f(): return float('nan')
""",
        """
assert f() != f() and f() is not None
""",
    ),
    "coroutines": (
        """
import asyncio
async def f(x):
    await asyncio.sleep(0)
    return x + 1
""",
        """
import asyncio
assert asyncio.run(f(1)) == 2
""",
    ),
    "classes": (
        """
class A:
    z = 3
    @staticmethod
    def s(): return 1
    @classmethod
    def c(cls): return cls()
    @property
    def p(self): return 2
class B(A): pass
""",
        """
assert A.s() == 1
assert isinstance(A.c(), A)
assert isinstance(B(), A)
assert not isinstance(A(), B)
assert A().p == 2
assert A.z == 3
assert A.__name__ == 'A'
assert not isinstance(3, A)
del A.z
assert not hasattr(A, 'z')
""",
    ),
    "a class Solution": (
        """
class Solution:
    def f(self, x: int) -> int: return x + 1
""",
        """
assert Solution().f(1) == 2
""",
    ),
    "check(candidate)": (
        """
def f(x): return x
""",
        """
def check(candidate):
    for i in range(50): assert candidate(i) == i
check(f)
""",
    ),
    "named arguments": (
        """
def f(a, *b, c=3, **d): return [a, list(b), c, d]
""",
        """
assert f(1, 2, c=4, e=5) == [1, [2], 4, {'e': 5}]
""",
    ),
    "closures keep their state": (
        """
def counter():
    n = 0
    def step():
        nonlocal n
        n += 1
        return n
    return step
""",
        """
c = counter()
assert [c(), c()] == [1, 2]
""",
    ),
    "the test's own objects": (
        """
def f(x): return x + 1
""",
        """
class Case:
    def __init__(self, x): self.x = x
    def run(self): return f(self.x)
assert Case(1).run() == 2
""",
    ),
    "a large answer": (
        """
def f(n): return list(range(n))
""",
        """
assert f(200000) == list(range(200000))
""",
    ),
    "context managers": (
        """
class Open:
    log = []
    def __enter__(self): self.log.append('in'); return 3
    def __exit__(self, kind, error, traceback): self.log.append(kind and (kind.__name__, str(error)))
""",
        """
with Open() as x: assert x == 3
try:
    with Open(): raise ValueError('why')
except ValueError: pass
assert Open.log == ['in', None, 'in', ('ValueError', 'why')]
""",
    ),
    "objects in sets": (
        """
class P:
    def __init__(self, x): self.x = x
    def __eq__(self, other): return self.x == other.x
    def __hash__(self): return hash(self.x)
def f(): return {P(1): 'one'}
""",
        """
assert len({P(1), P(1), P(2)}) == 2 and f()[P(1)] == 'one'
""",
    ),
    "objects with a format": (
        """
class Money:
    def __str__(self): return 'money'
    def __format__(self, how): return 'Money ' + how
""",
        """
assert f'{Money():x}' == 'Money x' and f'{Money()!s}' == 'money'
""",
    ),
    "attributes of exceptions": (
        """
class Odd(Exception):
    def __init__(self, code):
        super().__init__(code)
        self.code = code
def f(x): raise Odd(x)
""",
        """
try: f(5)
except Odd as error: assert error.code == 5 and str(error) == '5'
else: assert False
""",
    ),
    "a function that is called like a module, beside others": (
        """
class Matrix:
    def __init__(self, rows): self.rows = rows
def trace(m): return sum(row[i] for i, row in enumerate(m.rows))
""",
        """
assert trace(Matrix([[1, 2], [3, 4]])) == 5
""",
    ),
}
