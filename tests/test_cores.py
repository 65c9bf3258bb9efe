"""Cores that a process may use: its affinity, and the quota of its container."""

import os

import pytest

from swift_vlpack import cores


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of 64 cores on which the control groups of this process have these files."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(cores, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(cores, "OWN_GROUPS", tmp_path / "own")

    def of(own="0::/\n", **files):
        (tmp_path / "own").write_text(own)
        for name, text in files.items():
            file = tmp_path / "cgroup" / name.replace("__", "/").replace("cpu_max", "cpu.max").replace("cfs", "cpu.cfs")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return cores.num_cores()

    return of


@pytest.mark.parametrize(
    ("quota", "allowed"), [("200000", 2), ("250000", 3), ("50000", 1), ("max", 64), ("9900000", 64)]
)
def test_quota_of_a_container_counts(machine, quota, allowed):
    """LEN-25: as `docker run --cpus=2` sets it, in version 2 of control groups."""
    assert machine(cpu_max=f"{quota} 100000\n") == allowed


def test_quota_of_the_older_version_counts(machine):
    """LEN-25"""
    own = "4:cpu,cpuacct:/docker/abc\n1:name=systemd:/\n"
    assert machine(own, cpu__cfs_quota_us="400000\n", cpu__cfs_period_us="100000\n") == 4


def test_smallest_quota_of_all_groups_counts(machine):
    """LEN-25: a step of a batch system lies in the group of its job."""
    own = "0::/jobs/job_7/step_0\n"
    files = {"jobs__job_7__step_0__cpu_max": "max 100000\n", "jobs__job_7__cpu_max": "800000 100000\n"}
    assert machine(own, **files, jobs__cpu_max="1600000 100000\n") == 8


def test_without_control_groups_the_affinity_counts(tmp_path, monkeypatch):
    """LEN-25"""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 7}, raising=False)
    monkeypatch.setattr(cores, "OWN_GROUPS", tmp_path / "none")
    assert cores.num_cores() == 3
