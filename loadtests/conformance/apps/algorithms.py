"""Programs with an algorithm in them, and ways to end early."""

from __future__ import annotations

from loadtests.conformance.row import apps

ROWS = [
    apps(
        "shortest_path",
        """
import heapq
import sys


def main():
    data = iter(sys.stdin.read().split())
    n, m = int(next(data)), int(next(data))
    near = {i: [] for i in range(1, n + 1)}
    for _ in range(m):
        a, b, w = int(next(data)), int(next(data)), int(next(data))
        near[a].append((b, w))
        near[b].append((a, w))
    best, heap = {}, [(0, 1)]
    while heap:
        d, node = heapq.heappop(heap)
        if node in best:
            continue
        best[node] = d
        for other, w in near[node]:
            heapq.heappush(heap, (d + w, other))
    print(best.get(n, -1))


if __name__ == "__main__":
    main()
""",
        [
            ("3 3\n1 2 1\n2 3 1\n1 3 5\n", "2\n"),
            ("2 0\n", "-1\n"),
            ("1 0\n", "0\n"),
            ("4 3\n4 3 2\n3 1 7\n1 2 1\n", "9\n"),
        ],
        ("        near[b].append((a, w))\n", ""),
        ("(d + w, other)", "(max(d, w), other)"),
    ),
    apps(
        "knapsack",
        """
n, capacity = map(int, input().split())
best = [0] * (capacity + 1)
for _ in range(n):
    weight, value = map(int, input().split())
    for c in range(capacity, weight - 1, -1):
        best[c] = max(best[c], best[c - weight] + value)
print(best[capacity])
""",
        [
            ("3 5\n2 3\n3 4\n4 6\n", "7\n"),
            ("1 5\n1 1\n", "1\n"),
            ("0 3\n", "0\n"),
            ("1 3\n3 9\n", "9\n"),
        ],
        ("range(capacity, weight - 1, -1)", "range(weight, capacity + 1)"),
        ("weight - 1, -1", "weight, -1"),
    ),
    apps(
        "increasing_subsequence",
        """
from bisect import bisect_left

input()
tails = []
for x in map(int, input().split()):
    i = bisect_left(tails, x)
    tails[i : i + 1] = [x]
print(len(tails))
""",
        [
            ("6\n3 1 2 5 4 6\n", "4\n"),
            ("3\n2 2 2\n", "1\n"),
            ("0\n\n", "0\n"),
            ("4\n4 3 2 1\n", "1\n"),
        ],
        ("bisect_left(tails, x)", "bisect_left(tails, x + 1)"),
        ("print(len(tails))", "print(len(tails) or 1)"),
    ),
    apps(
        "grid_walk",
        """
from collections import deque

rows, columns = map(int, input().split())
grid = [input() for _ in range(rows)]
queue, seen = deque([(0, 0, 0)]), {(0, 0)}
answer = "no way"
while queue:
    r, c, d = queue.popleft()
    if (r, c) == (rows - 1, columns - 1):
        answer = d
        break
    for y, x in ((r + 1, c), (r - 1, c), (r, c + 1), (r, c - 1)):
        if 0 <= y < rows and 0 <= x < columns and grid[y][x] == "." and (y, x) not in seen:
            seen.add((y, x))
            queue.append((y, x, d + 1))
print(answer)
""",
        [
            ("2 2\n..\n..\n", "2\n"),
            ("2 2\n.#\n#.\n", "no way\n"),
            ("3 3\n..#\n#..\n...\n", "4\n"),
            ("1 1\n.\n", "0\n"),
            ("3 3\n...\n##.\n...\n", "4\n"),
            ("5 3\n...\n##.\n...\n.##\n...\n", "10\n"),
            ("5 5\n.....\n.###.\n.#...\n.#.##\n.....\n", "8\n"),
        ],
        ("queue.popleft()", "queue.pop()"),
        ("(r, c + 1), (r, c - 1)", "(r, c + 1)"),
    ),
    apps(
        "early_exit",
        """
import sys

n = int(sys.stdin.readline())
if n < 0:
    print("negative")
    sys.exit()
if n == 0:
    print("zero")
    raise SystemExit
print("positive" if n % 2 else "positive even")
quit()
print("never")
""",
        [
            ("-1\n", "negative\n"),
            ("0\n", "zero\n"),
            ("3\n", "positive\n"),
            ("4\n", "positive even\n"),
        ],
        ("    sys.exit()\n", ""),
        ("quit()", "sys.exit(1)"),
    ),
    apps(
        "many_lines",
        """
n = int(input())
for i in range(n):
    print(i, i * i)
""",
        [
            ("3\n", "0 0\n1 1\n2 4\n"),
            ("9000\n", "".join(f"{i} {i * i}\n" for i in range(9000))),
            ("0\n", ""),
        ],
        ("i * i", "i * i % 80000000"),
        ("range(n)", "range(min(n, 8999))"),
    ),
    apps(
        "interactive_guess",
        """
low, high = 1, int(input())
steps = 0
wanted = int(input())
while True:
    middle = (low + high) // 2
    steps += 1
    if middle == wanted:
        break
    if middle < wanted:
        low = middle + 1
    else:
        high = middle - 1
print(steps, flush=True)
""",
        [("100\n50\n", "1\n"), ("100\n100\n", "7\n"), ("1\n1\n", "1\n"), ("8\n5\n", "3\n")],
        ("(low + high) // 2", "(low + high + 1) // 2"),
        (
            "steps = 0",
            "steps = 1",
            "    steps += 1\n    if middle == wanted:\n        break\n",
            "    if middle == wanted:\n        break\n    steps += middle < wanted\n",
        ),
    ),
    apps(
        "joined_sets",
        """
import sys

sys.setrecursionlimit(10**6)
n, m = map(int, input().split())
parent = list(range(n + 1))


def find(x):
    if parent[x] != x:
        parent[x] = find(parent[x])
    return parent[x]


for _ in range(m):
    a, b = map(int, input().split())
    parent[find(a)] = find(b)
print(len({find(x) for x in range(1, n + 1)}))
""",
        [
            ("4 2\n1 2\n3 4\n", "2\n"),
            ("3 0\n", "3\n"),
            ("3 3\n1 2\n2 3\n3 1\n", "1\n"),
            ("4 3\n1 2\n1 3\n1 4\n", "1\n"),
        ],
        ("parent[find(a)] = find(b)", "parent[a] = find(b)"),
        ("range(1, n + 1)})", "range(n + 1)})"),
    ),
    apps(
        "sliding_sum",
        """
n, k = map(int, input().split())
values = list(map(int, input().split()))
total = best = sum(values[:k])
for i in range(k, n):
    total += values[i] - values[i - k]
    best = max(best, total)
print(best)
""",
        [("5 2\n1 2 3 4 5\n", "9\n"), ("3 3\n-1 -2 -3\n", "-6\n"), ("4 1\n-5 -2 -9 -2\n", "-2\n")],
        ("total = best = sum(values[:k])", "total = sum(values[:k])\nbest = 0"),
        ("range(k, n)", "range(k, n - 1)"),
    ),
    apps(
        "bank_commands",
        """
import sys

accounts = {}
for line in sys.stdin:
    match line.split():
        case ["open", name]:
            accounts.setdefault(name, 0)
        case ["pay", name, amount] if name in accounts:
            accounts[name] += int(amount)
        case ["show"]:
            for name in sorted(accounts):
                print(name, accounts[name])
        case []:
            pass
        case _:
            print("error")
""",
        [
            ("open a\npay a 5\nopen a\nshow\n", "a 5\n"),
            ("pay b 1\n\nbad\n", "error\nerror\n"),
            ("open z\nopen b\nshow\n", "b 0\nz 0\n"),
        ],
        ("accounts.setdefault(name, 0)", "accounts[name] = 0"),
        ("        case []:\n            pass\n", ""),
    ),
    apps(
        "matrix_spiral",
        """
rows, columns = map(int, input().split())
grid = [input().split() for _ in range(rows)]
out = []
while grid:
    out += grid.pop(0)
    grid = [list(row) for row in zip(*grid)][::-1]
print(*out)
""",
        [
            ("2 3\n1 2 3\n4 5 6\n", "1 2 3 6 5 4\n"),
            ("1 1\n7\n", "7\n"),
            ("3 1\na\nb\nc\n", "a b c\n"),
            ("3 3\n1 2 3\n4 5 6\n7 8 9\n", "1 2 3 6 9 8 7 4 5\n"),
        ],
        ("[::-1]", ""),
        ("while grid:", "while len(grid) > 1 or not out:"),
    ),
    apps(
        "last_survivor",
        """
n, k = map(int, input().split())
place = 0
for size in range(2, n + 1):
    place = (place + k) % size
print(place + 1)
""",
        [("7 3\n", "4\n"), ("1 5\n", "1\n"), ("5 1\n", "5\n"), ("41 3\n", "31\n")],
        ("print(place + 1)", "print(place)"),
        ("range(2, n + 1)", "range(2, n)"),
    ),
    apps(
        "prime_gaps",
        """
n = int(input())
sieve = bytearray([1]) * (n + 1)
sieve[:2] = bytes(min(2, n + 1))
for p in range(2, int(n**0.5) + 1):
    if sieve[p]:
        sieve[p * p :: p] = bytes(len(range(p * p, n + 1, p)))
primes = [i for i in range(n + 1) if sieve[i]]
gaps = [b - a for a, b in zip(primes, primes[1:])]
print(len(primes), max(gaps, default=0))
""",
        [
            ("30\n", "10 6\n"),
            ("1\n", "0 0\n"),
            ("2\n", "1 0\n"),
            ("25\n", "9 4\n"),
            ("100000\n", "9592 72\n"),
        ],
        ("int(n**0.5) + 1)", "int(n**0.5))"),
        ("max(gaps, default=0)", "max(gaps or [1])"),
    ),
    apps(
        "merge_sorted_files",
        """
import heapq
import sys

lists = [list(map(int, line.split())) for line in sys.stdin]
last = None
for x in heapq.merge(*lists):
    if x != last:
        print(x, end=" ")
    last = x
print()
""",
        [("1 3 5\n2 3\n", "1 2 3 5\n"), ("", "\n"), ("0 0\n\n-1\n", "-1 0\n")],
        ("    if x != last:\n        print", "    if x and x != last:\n        print"),
        ("    last = x\n", "    last = last or x\n"),
    ),
    apps(
        "stable_ranking",
        """
n = int(input())
people = []
for _ in range(n):
    name, score = input().rsplit(" ", 1)
    people.append((name, int(score)))
ordered = sorted(people, key=lambda p: -p[1])
for name, score in ordered:
    rank = 1 + sum(other > score for _, other in people)
    print(f"{rank}. {name} ({score})")
""",
        [
            ("3\nann lee 5\nbo 7\ncy 5\n", "1. bo (7)\n2. ann lee (5)\n2. cy (5)\n"),
            ("0\n", ""),
            ("2\nb 1\na 1\n", "1. b (1)\n1. a (1)\n"),
        ],
        ("sorted(people, key=lambda p: -p[1])", "sorted(people, key=lambda p: (-p[1], p[0]))"),
        ("other > score", "other >= score"),
    ),
]
