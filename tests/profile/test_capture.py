"""A run takes a trace of itself: planned, asked for while it lives, on one process and on two."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from windlass.config.observe import ProfileConfig  # noqa: E402
from windlass.errors import ProfileError  # noqa: E402
from windlass.files import write_json  # noqa: E402
from windlass.profile.captures import (  # noqa: E402
    TraceRequest,
    answer_file,
    find_target,
    read_request,
    request_file,
    submit_request,
    wait_for_trace,
)
from windlass.profile.job_profile import profile_traces  # noqa: E402
from windlass.runs import Run  # noqa: E402
from windlass.runs.lock import locked  # noqa: E402
from windlass.train.profiler import Profiler  # noqa: E402


def job_on(path, *, rank=0, world=1, said=None, **config):
    run = Run(path)
    if rank == 0 and not run.config_file.exists():
        write_json(run.config_file, {"name": "run"})
    where = SimpleNamespace(rank=rank, size=world, device=torch.device("cpu"))
    recipe = SimpleNamespace(profile=ProfileConfig(**config))
    return SimpleNamespace(recipe=recipe, run=run, world=where, step=0, say=(said if said is not None else []).append)


def train(job, steps, hook=None, *, each=None):
    hook = hook or Profiler(poll_seconds=0.0)
    weight = torch.randn(64, 64, requires_grad=True)
    hook.on_start(job)
    for _ in range(steps):
        hook.on_step_begin(job)
        (weight @ weight).sum().backward()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(weight.grad)
        job.step += 1
        hook.on_step_end(job, None)
        if each:
            each(job)
    hook.on_stop(job, None)
    return hook


def profiled(run):
    return [e for e in run.events() if e.event == "profiled"]


def test_the_recipe_names_the_steps(tmp_path):
    said: list[str] = []
    job = job_on(tmp_path / "run", steps="3:6", said=said)
    train(job, 8)
    (event,) = profiled(job.run)
    assert (event.steps, event.files) == ("3:6", ["profile/step-000000003/rank-00000.json.gz"])
    result = profile_traces(find_target(job.run.path).traces)
    assert result.ranks[0].step_numbers == [3, 4, 5]
    assert any(
        o.name == "aten::mm" and o.calls == 9 for o in result.ranks[0].operators
    )  # forward and two backward products
    assert "windlass profile run" in said[0]


def test_the_first_step_can_be_profiled_and_a_run_that_ends_early_keeps_what_it_has(tmp_path):
    job = job_on(tmp_path / "run", steps="1:100")
    train(job, 4)
    assert profiled(job.run)[0].steps == "1:5"
    assert profile_traces(find_target(job.run.path).traces).steps == 4


def test_other_ranks_and_a_passed_window_do_nothing(tmp_path):
    job = job_on(tmp_path / "run", steps="2:4", ranks=[3])
    train(job, 6)
    resumed = job_on(tmp_path / "run", steps="2:4")
    resumed.step = 5
    train(resumed, 3)
    assert profiled(job.run) == []
    assert not job.run.profile.exists()


def test_outside_the_window_the_profiler_does_not_exist(tmp_path, monkeypatch):
    created = []
    real = torch.profiler.profile

    def counted(*args, **kwargs):
        created.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(torch.profiler, "profile", counted)
    job = job_on(tmp_path / "run", steps="6:8")
    counts = []
    train(job, 10, each=lambda j: counts.append(len(created)))
    assert counts == [0, 0, 0, 0, 1, 1, 1, 1, 1, 1]  # created one step ahead, to warm up


def test_a_live_run_answers_a_request(tmp_path):
    job = job_on(tmp_path / "run")
    request = TraceRequest(id="r1", steps=2, shapes=True)

    def ask(job):
        if job.step == 2:
            submit_request(job.run, request)

    with locked(job.run.lock_file):
        train(job, 8, each=ask)
    files = wait_for_trace(job.run, request, 0.0)
    assert files == ["profile/step-000000004/rank-00000.json.gz"]
    assert not request_file(job.run).exists()
    assert not answer_file(job.run).exists()
    shapes = profile_traces([job.run.path / files[0]], by_shape=True).ranks[0].operators
    assert any(o.shape == "[[64, 64], [64, 64]]" for o in shapes)


def test_a_dead_run_refuses_a_request(tmp_path):
    job = job_on(tmp_path / "run")
    with pytest.raises(ProfileError) as error:
        submit_request(job.run, TraceRequest(id="r1"))
    assert error.value.code == "profile.run-not-training"
    assert "profile.steps" in error.value.hint
    with locked(job.run.lock_file), pytest.raises(ProfileError) as error:
        submit_request(job.run, TraceRequest(id="r1", steps=0))
    assert error.value.code == "profile.window-length-invalid"


def test_a_stray_request_is_thrown_away(tmp_path):
    job = job_on(tmp_path / "run")
    write_json(request_file(job.run), {"who": "me"})
    train(job, 3)
    assert not request_file(job.run).exists()
    assert profiled(job.run) == []
    assert read_request(tmp_path / "none.json") is None


def test_a_failing_profiler_does_not_end_the_run(tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(
        torch.profiler.profile, "export_chrome_trace", lambda *a: (_ for _ in ()).throw(OSError(28, "no space left"))
    )
    job = job_on(tmp_path / "run", steps="2:3", said=said)
    train(job, 5)
    assert job.step == 5
    assert "profiling failed on rank 0" in said[0]
    assert "no space left" in said[0]


def test_two_profilers_in_one_process_do_not_crash_it(tmp_path):
    said: list[str] = []
    job = job_on(tmp_path / "run", steps="2:4", said=said)

    class Both(Profiler):
        def __init__(self):
            super().__init__(poll_seconds=0.0)
            self.other = Profiler(poll_seconds=0.0)

        def on_start(self, job):
            super().on_start(job)
            self.other.on_start(job)

        def on_step_begin(self, job):
            super().on_step_begin(job)
            self.other.on_step_begin(job)

    train(job, 6, Both())
    assert "profiled already" in said[0]
    assert [e.steps for e in profiled(job.run)] == ["2:4"]


def test_out_of_memory_leaves_a_snapshot(tmp_path, monkeypatch):
    from windlass.train import profiler

    observers = []
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", observers.append, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_text("blocks"))
    job = job_on(tmp_path / "run")
    profiler.watch_out_of_memory(job.run, 5)
    observers[0](0, 1, 2, 3)
    assert (job.run.profile / "out-of-memory-00005.pickle").read_text() == "blocks"


def worker(rank, port, path):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    job = job_on(path, rank=rank, world=2, steps="2:5", ranks=[])
    train(job, 6)
    torch.distributed.destroy_process_group()


@pytest.mark.multi
def test_two_ranks_over_gloo_make_one_set(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = tmp_path / "run"
    write_json(Run(path).config_file, {"name": "run"})
    torch.multiprocessing.start_processes(worker, args=(port, path), nprocs=2, start_method="spawn")
    job = profile_traces(find_target(path).traces)
    assert [(r.rank, r.world_size, r.backend, r.steps) for r in job.ranks] == [(0, 2, "gloo", 3), (1, 2, "gloo", 3)]
    for rank in job.ranks:
        assert rank.communication.total_us > 0
        assert sum(rank.categories_us.values()) == pytest.approx(rank.step_us)
        assert rank.gpu_utilization is None
    assert job.spread.straggler in (0, 1)
    assert profile_traces(find_target(path).traces, "tb").categories_us["Communication"] > 0
