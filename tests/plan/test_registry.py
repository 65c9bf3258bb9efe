import json
import subprocess
import sys

import numpy as np
import pytest

import swift_vlpack
from swift_vlpack import Packer, PackingConfig, plan
from swift_vlpack.errors import ConfigError, StrategyError
from swift_vlpack.plan import registry
from swift_vlpack.plan.registry import register_strategy, strategy_named
from swift_vlpack.plan.strategies import Caps, best_fit
from tests import cases
from tests.contract import Ledger, assert_resumes_at_every_step, run

PAIRS = """
def pairs(lengths, capacity):
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    groups = []
    while order:
        group = [order.pop()]
        if order and lengths[group[0]] + lengths[order[0]] <= capacity:
            group.append(order.pop(0))
        groups.append(group)
    return groups

def textbook(lengths, capacity, caps=None):
    from swift_vlpack.plan.strategies import best_fit
    return best_fit(lengths, capacity, caps)

class Nested:
    static = staticmethod(pairs)

not_a_function = 3
def needs_three(lengths, capacity, more): ...
"""


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    registry._imported.cache_clear()


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module in the current directory, which is not on the path: as under the command `vlpack`."""
    name = f"mine_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(PAIRS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [part for part in sys.path if part])
    return name


def config(strategy, **options):
    return PackingConfig(**{"packing_length": 10, "packing_strategy": strategy, "packing_buffer": 4, **options})


def test_module_and_function_of_the_current_directory_group_a_plan_and_a_stream(module):
    """STRAT-8"""
    options = config(f"{module}:pairs", packing_drop_last=False, packing_buffer=6)
    assert sorted(plan([6, 5, 4, 5, 7, 3], options)) == [[0, 2], [1, 3], [4, 5]]
    packs = run(Packer(options), [(n, length) for n, length in enumerate([6, 5, 4, 5, 7, 3])])
    assert sorted(pack.ids for pack in packs) == [(0, 2), (1, 3), (4, 5)]
    assert plan([6, 5], options).method == f"{module}:pairs"
    assert sorted(plan([6, 4], config(f"{module}:Nested.static"))) == [[0, 1]]


def test_current_directory_comes_last_on_the_path(module):
    """STRAT-8"""
    assert sorted(plan([6, 4], config(f"{module}:pairs"))) == [[0, 1]]
    before, last = sys.path[:-1], sys.path[-1]
    assert last.endswith(module.removeprefix("mine_"))
    assert last not in before


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("no_such_module_xyz:pairs", ["no_such_module_xyz", "current directory", "PYTHONPATH"]),
        ("{}:no_such", ["{} has no no_such"]),
        ("{}:", ["{} has no name after the colon"]),
        ("{}:not_a_function", ["it must be a function", "(lengths, capacity)"]),
        ("{}:needs_three", ["must take (lengths, capacity)", "more"]),
        ("magic", ["must be one of binpack", "sequential", "module:function", "'magic'"]),
    ],
)
def test_a_name_that_cannot_be_found_is_refused_at_construction(module, path, said):
    """STRAT-8 CONF-1"""
    with pytest.raises(ConfigError) as refused:
        config(path.format(module))
    for part in ("packing_strategy", *said):
        assert part.format(module) in str(refused.value)


def test_a_module_that_fails_to_import_is_named_with_its_error(tmp_path, monkeypatch):
    """STRAT-8"""
    (tmp_path / "broken_strategy_module.py").write_text("raise RuntimeError('half done')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"broken_strategy_module.*RuntimeError: half done"):
        config("broken_strategy_module:anything")


def test_registered_as_decorator_and_as_call():
    """STRAT-9"""

    @register_strategy("alone")
    def alone(lengths, capacity):
        return [[index] for index in range(len(lengths))]

    assert alone([5], 9) == [[0]]
    assert swift_vlpack.register_strategy("tight", best_fit) is best_fit
    options = {"packing_drop_last": False, "packing_buffer": 9}
    assert sorted(plan([3, 4, 5], config("alone", **options))) == [[0], [1], [2]]
    assert sorted(plan([3, 4, 5], config("tight", **options))) == sorted(plan([3, 4, 5], config("best_fit", **options)))
    assert config("alone").packing_strategy == "alone"
    assert config("alone").digest() != config("tight").digest()


def test_a_name_has_one_meaning():
    """STRAT-9"""
    register_strategy("mine", best_fit)
    register_strategy("mine", best_fit)  # a plugin file that is loaded twice
    with pytest.raises(ConfigError, match=r"mine is registered already, as .*best_fit"):
        register_strategy("mine", lambda lengths, capacity: [])
    for name in ("exact", "sequential"):
        with pytest.raises(ConfigError, match=f"{name} is a strategy of this package"):
            register_strategy(name, best_fit)
    for name in ("a:b", " ", 3):
        with pytest.raises(ConfigError, match="without a colon"):
            register_strategy(name, best_fit)
    with pytest.raises(ConfigError, match=r"must take \(lengths, capacity\)"):
        register_strategy("one", lambda lengths: [])


def test_the_same_file_loaded_under_another_module_name_registers_again(tmp_path):
    """STRAT-9: ms-swift loads plugins under a hashed name, and again in spawned workers."""
    from importlib.util import module_from_spec, spec_from_file_location

    file = tmp_path / "plugin.py"
    file.write_text(
        "from swift_vlpack import register_strategy\n"
        "@register_strategy('twice')\ndef twice(lengths, capacity):\n    return [[i] for i in range(len(lengths))]\n"
    )
    for name in ("plugin_a", "plugin_b"):
        spec = spec_from_file_location(name, file)
        spec.loader.exec_module(module_from_spec(spec))
    assert strategy_named("twice")([1, 2], 3) == [[0], [1]]


@pytest.mark.parametrize(
    ("groups", "rule"),
    [
        ([[0, 1], [2]], "index 3 is in no group"),
        ([[0, 1], [1, 2], [3]], "index 1 is in groups 0 and 1"),
        ([[0, 0], [1], [2], [3]], "index 0 is in groups 0 and 0"),
        ([[0, 1], [2, 3], [4]], "group 2 has index 4, but indices go from 0 to 3"),
        ([[0, 1], [2, 3], [-1]], "group 2 has index -1"),
        ([[0, 1, 2], [3]], "group 0 has 12 tokens; the capacity is 10"),
        ([[0, 1], [], [2, 3]], "group 1 is empty"),
        ([[0, 1.5], [2, 3]], "TypeError"),
        (None, "TypeError"),
        (ValueError("no idea"), "failed (ValueError: no idea)"),
    ],
)
def test_what_it_returns_is_checked_and_the_error_names_function_buffer_and_rule(groups, rule):
    """STRAT-10"""

    @register_strategy("liar")
    def liar(lengths, capacity):
        if lengths[0] == 4:
            if isinstance(groups, Exception):
                raise groups
            return groups
        return [[index] for index in range(len(lengths))]

    packer = Packer(config("liar", packing_min_fill_ratio=0.6))
    items = [(number, 7 if number < 4 else 4) for number in range(8)]  # the first buffer is good
    with pytest.raises(StrategyError) as refused:
        run(packer, items)
    for part in ("packing_strategy liar", rule, "(buffer 2, of 4 samples)"):
        assert part in str(refused.value)


def test_caps_are_checked_and_handed_to_who_asks_for_them(module):
    """STRAT-10"""
    lengths, caps = [2, 2, 2, 2], Caps((2,), [(1,)] * 4)
    register_strategy("all", lambda lengths, capacity: [range(len(lengths))])
    assert strategy_named("all")(lengths, 10) == [[0, 1, 2, 3]]
    with pytest.raises(StrategyError, match="group 0 exceeds a cap"):
        strategy_named("all")(lengths, 10, caps)
    assert strategy_named(f"{module}:textbook")(lengths, 10, caps) == best_fit(lengths, 10, caps)
    capped = config(f"{module}:textbook", packing_max_samples=1, packing_drop_last=False)
    assert sorted(plan([2, 2, 2], capped)) == [[0], [1], [2]]


def test_it_may_use_numpy_and_spoil_its_lengths():
    """STRAT-10"""

    @register_strategy("rough")
    def rough(lengths, capacity):
        order = np.argsort(lengths)[::-1]
        lengths.clear()
        return ((index,) for index in order)

    given = [3, 5, 4]
    assert strategy_named("rough")(given, 10) == [[1], [2], [0]]
    assert given == [3, 5, 4]
    assert strategy_named("rough")([], 10) == []


def test_the_laws_hold_under_a_strategy_of_ones_own(module):
    """STRAT-8 PACK-2 PACK-10"""
    for case in cases.cases(30, strategies=(f"{module}:textbook",)):
        ledger = Ledger(case.config, seed=case.seed)
        for item in case.items:
            ledger.push(item)
        ledger.flush()
        if len(case.items) <= 60:
            assert_resumes_at_every_step(case.config, case.items, seed=case.seed)


def test_the_digest_of_a_plan_tells_when_the_function_groups_otherwise():
    """STRAT-11: a resumed run compares it, so a function that was edited in between is found."""
    lengths, digests = [6, 5, 4, 5, 7, 3], set()
    for edited in (lambda lengths, capacity: [[i] for i in range(len(lengths))], best_fit):
        registry._registered.clear()
        register_strategy("edited", edited)
        digests.add(plan(lengths, config("edited")).digest())
    assert len(digests) == 2


def test_vlpack_plan_takes_it_by_flag_and_variable(module, tmp_path):
    """STRAT-8"""
    lengths = tmp_path / "lengths.json"
    lengths.write_text(json.dumps([6, 5, 4, 5, 7, 3]))
    script = tmp_path / "bin" / "vlpack.py"  # as of a console script, its folder is on the path and this one is not
    script.parent.mkdir()
    script.write_text("import sys\nfrom swift_vlpack.cli import main\nsys.exit(main())\n")
    command = [sys.executable, str(script), "plan", "--lengths", str(lengths), "--packing_length", "10", "--json"]
    for flags, environ in (
        (["--packing_strategy", f"{module}:pairs"], {}),
        ([], {"VLPACK_PACKING_STRATEGY": f"{module}:pairs"}),
    ):
        done = subprocess.run([*command, *flags], capture_output=True, text=True, env=environ, check=False, timeout=600)
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert (report["packing_strategy"], report["num_packs"]) == (f"{module}:pairs", 3)
    wrong = [*command, "--packing_strategy", f"{module}:no_such"]
    done = subprocess.run(wrong, capture_output=True, text=True, check=False, timeout=600)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "has no no_such" in done.stderr
