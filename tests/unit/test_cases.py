"""The lists of cases, which the tests of every backend draw from."""

from dataclasses import fields
from itertools import combinations

import numpy as np
import pytest

from tests.support.build import build
from tests.support.cases import (
    AXES,
    CORNER,
    LATENT_AXES,
    SMOKE,
    TINY_AXES,
    Case,
    grid,
    latents,
    pair_allowed,
    pairwise,
    tiny,
)
from tests.support.compare import bits
from tests.support.random_problems import FAMILIES, random_problem


@pytest.mark.parametrize("axes", [AXES, TINY_AXES, LATENT_AXES], ids=["grid", "tiny", "latents"])
def test_every_allowed_pair_occurs(axes):
    rows = pairwise(axes, pair_allowed)
    for a, b in combinations(axes, 2):
        met = [(row[a], row[b]) for row in rows]
        for x in axes[a]:
            for y in axes[b]:
                assert ((x, y) in met) == pair_allowed({a: x, b: y})
    assert len(rows) < 100


@pytest.mark.parametrize(
    "cases", [SMOKE, CORNER, grid(), tiny(), latents()], ids=["smoke", "corner", "grid", "tiny", "latents"]
)
def test_names_tell_cases_apart(cases):
    assert len({str(case) for case in cases}) == len(set(cases)) == len(cases)


@pytest.mark.parametrize("cases", [SMOKE, grid()], ids=["smoke", "grid"])
def test_every_field_is_varied(cases):
    for field in fields(Case):
        if field.name not in ("tag", "seed", "lse"):
            assert len({getattr(case, field.name) for case in cases}) > 1, field.name


def test_a_call_outside_the_contract_is_no_case():
    with pytest.raises(ValueError, match="scale is required"):
        Case(mode="latent", kv_num_heads=1, v_head_size=32)
    with pytest.raises(ValueError, match="needs scales"):
        Case(cache="int8")


def test_a_case_has_the_same_numbers_every_time():
    case = Case(strided=True, bias="BH", slots="holes", rope="full")
    one, two = build(case), build(case)
    assert one.parents.keys() == two.parents.keys()
    for name, (parent, _) in one.parents.items():
        assert np.array_equal(bits(parent), bits(two.parents[name][0])), name


@pytest.mark.parametrize("family", FAMILIES)
def test_what_takes_a_random_problems_place_fits_its_arrays(family):
    shapes = set()
    for seed in range(8):
        problem = random_problem(family, seed)
        assert problem == random_problem(family, seed)
        one, two = build(problem.case), build(problem.other, problem.case)
        assert [(n, x.shape) for n, x in one.inputs.items()] == [(n, x.shape) for n, x in two.inputs.items()]
        shapes.add(one["query"].shape)
    assert len(shapes) > 1
