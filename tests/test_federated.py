"""Rounds of federated learning within one process: results, resuming, clients, the folder."""

import json

import pytest
import torch

pytest.importorskip("flwr")
pytest.importorskip("torchvision")

import tiny  # noqa: E402
from rounds import asked, rows, run, trained  # noqa: E402

from gradfilter.federated import app, client, grid, server, settings  # noqa: E402
from gradfilter.federated.exchange import Exchange  # noqa: E402
from gradfilter.federated.folder import Folder  # noqa: E402
from gradfilter.recipes.screen import Screen  # noqa: E402
from gradfilter.recipes.trainer import Trainer  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_networks", "fresh_clients")

DRAW = Folder.draw


def test_a_round_is_the_weighted_mean_of_what_clients_trained(photos, tmp_path):
    both = asked(photos, tmp_path / "run", rounds=1, split="dirichlet")
    run(both)
    states, counts = zip(*(trained(both, part) for part in range(3)), strict=True)
    assert sum(counts) == 27 and len(set(counts)) > 1
    found = tiny.weights(tmp_path / "run")
    for name, value in found.items():
        if value.is_floating_point():
            mean = sum(n * s[name] for n, s in zip(counts, states, strict=True)) / 27
            torch.testing.assert_close(value, mean, rtol=1e-5, atol=1e-7)


def test_one_client_is_ordinary_training(photos, tmp_path):
    both = asked(photos, tmp_path / "run", rounds=1, simulate=1)
    run(both)
    alone, _ = trained(both, 0)
    assert tiny.same(alone, tiny.weights(tmp_path / "run"))


def test_rounds_go_on_where_the_last_one_ended(photos, tmp_path):
    """Without momentum, which ends with a round, two rounds of one client are one training."""
    both = asked(photos, tmp_path / "run", rounds=2, simulate=1, momentum=0.0, model="tiny")
    run(both)
    alone, _ = trained(both, 0, rounds=2)
    assert tiny.same(alone, tiny.weights(tmp_path / "run"))


def test_the_folder(photos, tmp_path, monkeypatch):
    out = tmp_path / "run"
    monkeypatch.setattr(Folder, "draw", DRAW)
    run(asked(photos, out, last=1, epochs=2))
    assert {p.name for p in out.iterdir()} >= {
        "best.pt", "last.pt", "rounds.csv", "clients.csv", "curves.png", "plan.yaml", "log.txt",
    }  # fmt: skip
    rounds, clients = rows(out, "rounds.csv"), rows(out)
    assert [r["round"] for r in rounds] == ["0", "1", "2", "3"] and len(clients) == 9
    assert {r["status"] for r in clients} == {"used"}
    assert {r["client"] for r in clients} == {"0", "1", "2"}
    assert all(float(r[k]) > 0 for r in clients for k in ("seconds", "step_seconds", "loss"))
    each = int(clients[0]["bytes_down"])
    assert all(int(r[k]) == each for r in clients for k in ("bytes_down", "bytes_up"))
    assert int(rounds[1]["bytes"]) == 6 * each < int(rounds[1]["full_bytes"]) / 2
    assert json.loads((out / "result.json").read_text())["finished"] is True
    best = torch.load(out / "best.pt", weights_only=True)
    top = max(float(r["test_top1"]) for r in rounds[1:])
    assert best["metrics"]["test_top1"] == pytest.approx(top)


def test_it_learns_and_frozen_layers_stay(photos, tmp_path):
    both = asked(photos, tmp_path / "run", last=2, epochs=8, rounds=4, lr=3.0)
    run(both)
    rounds = rows(tmp_path / "run", "rounds.csv")
    assert float(rounds[-1]["test_loss"]) < 0.8 * float(rounds[0]["test_loss"])
    before = server.Server(asked(photos, tmp_path / "new"), Screen(quiet=True)).trainer.model
    after = tiny.weights(tmp_path / "run")
    assert torch.equal(before.state_dict()["0.weight"], after["0.weight"])
    assert not torch.equal(before.state_dict()["5.weight"], after["5.weight"])


def test_fedprox_pulls_back(photos, tmp_path):
    moved = {}
    for strategy, mu in (("fedavg", 0.0), ("fedprox", 0.0), ("fedprox", 3.0)):
        both = asked(photos, tmp_path / f"{strategy}{mu}", rounds=1, strategy=strategy, mu=mu,
                     epochs=4, momentum=0.0)  # fmt: skip
        run(both)
        start = server.Server(asked(photos, tmp_path / "new"), Screen(quiet=True))
        end = tiny.weights(tmp_path / f"{strategy}{mu}")
        moved[strategy, mu] = sum(
            (end[n] - p).square().sum().item() for n, p in start.exchange.tensors.items()
        )
    assert moved["fedprox", 0.0] == moved["fedavg", 0.0] > 0
    assert moved["fedprox", 3.0] < 0.8 * moved["fedavg", 0.0]


def test_the_pull_is_the_gradient_of_the_penalty(photos, tmp_path):
    trainer = server.Server(asked(photos, tmp_path / "run"), Screen(quiet=True)).trainer
    weight = trainer.parameters[0]
    with client.proximal(trainer, 0.5):
        weight.grad = torch.zeros_like(weight)
        with torch.no_grad():
            weight += 2.0
        trainer.optimizer.param_groups[0]["lr"] = 0.0
        trainer.optimizer.step()
        torch.testing.assert_close(weight.grad, torch.full_like(weight, 1.0))


@pytest.mark.parametrize("strategy", ["fedavg", "fedadam"])
def test_a_run_that_stopped_goes_on_as_if_it_had_not(strategy, photos, tmp_path):
    options = {"strategy": strategy, "rounds": 4, "model": "tiny"}
    run(asked(photos, tmp_path / "whole", **options))
    both = asked(photos, tmp_path / "run", **options)
    calls = []

    def stops(message, context):
        calls.append(context.node_id)
        if len(calls) == 8:  # in the third round
            raise KeyboardInterrupt
        return client.answer(message, context)

    here = grid.InProcess(stops, settings.to_config(both), grid.parts(3))
    with pytest.raises(KeyboardInterrupt):
        run(both, here=here)
    assert not (tmp_path / "run" / "result.json").exists()
    assert rows(tmp_path / "run", "rounds.csv")[-1]["round"] == "2"
    run(both)
    assert len(rows(tmp_path / "run")) == 12
    assert tiny.same(tiny.weights(tmp_path / "run"), tiny.weights(tmp_path / "whole"))


def test_a_kill_between_two_renames_loses_one_round_at_most(photos, tmp_path):
    out = tmp_path / "run"
    run(asked(photos, out))
    (out / "last.pt").unlink()
    run(asked(photos, out, rounds=4))
    assert "going on after round 2 of 4" in (out / "log.txt").read_text()


def test_a_share_of_the_clients(photos, tmp_path):
    run(asked(photos, tmp_path / "run", fraction=0.67))
    assert len(rows(tmp_path / "run")) == 6


def test_a_resumed_run_draws_the_clients_it_would_have_drawn(photos, tmp_path):
    options = {"fraction": 0.34, "rounds": 8, "model": "tiny"}
    run(asked(photos, tmp_path / "whole", **options))
    for rounds in (3, 5, 8):
        run(asked(photos, tmp_path / "run", **options | {"rounds": rounds}))
    drawn, whole = ([r["node"] for r in rows(tmp_path / name)] for name in ("run", "whole"))
    assert drawn == whole and len(set(drawn)) == 3


def test_devices_with_folders_of_their_own(photos, tmp_path):
    both = asked(photos, tmp_path / "run", rounds=1, clients=1)
    fewer = tmp_path / "fewer"
    for name in ("class2", "class0"):
        (fewer / name).mkdir(parents=True)
        for i in range(5):
            source = photos / "train" / name / f"{i}.png"
            (fewer / name / f"{i}.png").write_bytes(source.read_bytes())
    other = tiny.photographs(tmp_path / "other", each=2, classes=4)
    nodes = [{"data": str(fewer)}, {"data": str(other)}, {"data": str(photos), "name": "all"}]
    run(both, nodes=nodes)
    status = {r["client"]: r["status"] for r in rows(tmp_path / "run")}
    assert status["fewer"] == status["all"] == "used"
    assert "classes that the server does not know: class3" in status["...000002"]
    data = client.adopted(client.opened(str(fewer), None, False), ("class0", "class1", "class2"))
    assert set(data.train.labels.tolist()) == {0, 2}


@pytest.mark.parametrize("count", [2, 5])
def test_a_device_may_have_pictures_of_one_class(count, photos, tmp_path):
    mine = tmp_path / "mine" / "class2"
    mine.mkdir(parents=True)
    for i in range(count):
        source = photos / "train" / "class2" / f"{i}.png"
        (mine / f"{i}.png").write_bytes(source.read_bytes())
    both = asked(photos, tmp_path / "run", rounds=1)
    run(both, nodes=[{"data": str(mine.parent)}, {"data": str(photos)}])
    status = {r["client"]: r["status"] for r in rows(tmp_path / "run")}
    assert status == {"mine": "used", photos.name: "used"}


def test_a_client_with_other_frozen_weights_is_told(photos, tmp_path):
    both = asked(photos, tmp_path / "run", rounds=1, last=1)
    server.Server(both, Screen(quiet=True))  # weights of the usual seed
    other = tmp_path / "other.pt"
    model = Trainer(both[0].changed(seed=5), "classification", ("a", "b", "c")).model
    torch.save(model.state_dict(), other)
    nodes = [*grid.parts(3)[:2], grid.parts(3)[2] | {"weights": str(other)}]
    run(both, nodes=nodes)
    status = [r["status"] for r in rows(tmp_path / "run") if r["node"] == "3"]
    assert status == ["failed: the frozen layers differ from the server's: "
                      "other weights or versions"]  # fmt: skip


def test_batch_statistics_travel_when_they_are_trained(photos, tmp_path):
    both = asked(photos, tmp_path / "run", rounds=1, norm="batch", method="exact")
    run(both)
    start = server.Server(asked(photos, tmp_path / "new"), Screen(quiet=True)).trainer.model
    found = tiny.weights(tmp_path / "run")
    assert not torch.equal(found["1.running_mean"], start.state_dict()["1.running_mean"])
    assert found["1.num_batches_tracked"] == 0


def test_batch_statistics_of_one_picture(photos, tmp_path):
    """9 pictures a client: a last batch of one is left out; batches of one are refused at once."""
    run(asked(photos, tmp_path / "run", rounds=1, norm="batch", batch=4, epochs=1))
    assert {r["steps"] for r in rows(tmp_path / "run")} == {"2"}
    with pytest.raises(ValueError, match="one picture is too few"):
        run(asked(photos, tmp_path / "single", norm="batch", batch=1))
    assert not (tmp_path / "single" / "clients.csv").exists()


def test_masks(scenes, tmp_path):
    run(asked(scenes, tmp_path / "run", rounds=1, simulate=2))
    assert [r["status"] for r in rows(tmp_path / "run")] == ["used", "used"]
    assert "test_miou" in rows(tmp_path / "run", "rounds.csv")[0]


def test_clients_of_one_process_do_not_inherit_from_each_other(photos, tmp_path):
    """Warm-started layers and momentum: a client's result is that of a process of its own."""
    both = asked(photos, tmp_path / "run", rounds=1, method="asi", rank=2, simulate=2)
    found = {}

    def keeps(message, context):
        reply = client.answer(message, context)
        found[context.node_id] = reply.content["arrays"]["float32"].numpy()
        return reply

    run(both, here=grid.InProcess(keeps, settings.to_config(both), grid.parts(2)))
    together = dict(found)
    for number in (1, 2):
        client._trainer.cache_clear()
        alone = asked(photos, tmp_path / f"alone{number}", rounds=1, method="asi", rank=2,
                      simulate=2, clients=1)  # fmt: skip
        here = grid.InProcess(keeps, settings.to_config(alone), grid.parts(2))
        here.contexts = {number: here.contexts[number]}
        run(alone, here=here)
        assert (found[number] == together[number]).all()


def test_a_plan_travels_as_text(photos, tmp_path):
    plan = tmp_path / "plan.yaml"
    plan.write_text('"0": frozen\n"[35]": {method: galerkin, grid: 4}\n')
    both = asked(photos, tmp_path / "run", rounds=1, plan=str(plan))
    config = settings.to_config(both)
    plan.unlink()  # clients do not have it
    again = tmp_path / "again.yaml"
    found = settings.from_config(config, again)
    assert found[0].changed(plan=None) == both[0].changed(plan=None) and found[1] == both[1]
    run(found)
    assert rows(tmp_path / "run")[0]["status"] == "used"
    assert "0.weight" not in Exchange(client._trainer.__wrapped__(
        found[0].changed(data=""), "classification", ("a", "b", "c"), None, "none"
    ).model).tensors  # fmt: skip


def test_runs_of_one_process_have_their_own_plans(photos, tmp_path):
    found = []
    for rule in ("frozen", "exact"):
        plan = tmp_path / f"{rule}.yaml"
        plan.write_text(f'"0": {rule}\n"[35]": exact\n')
        config = settings.to_config(asked(photos, tmp_path / "run", plan=str(plan)))
        context = grid.InProcess(app.client, config, grid.parts(1)).contexts[1]
        trainer = client.ready(client.read(context)[0], "classification", ("a", "b"), -1, "none")
        found.append(trainer.model[0].weight.requires_grad)
    assert found == [False, True]


@pytest.mark.parametrize("in_process, given, workers", [(False, None, 2), (True, None, None),
                                                        (False, 5, 5)])  # fmt: skip
def test_simulated_clients_share_the_cores(in_process, given, workers, tmp_path, monkeypatch):
    monkeypatch.setattr(client, "default_workers", lambda world: 16)
    both = settings.of({"data": "x", "simulate": 9, "cpus": 2, "in_process": in_process,
                        "workers": given})  # fmt: skip
    context = grid.InProcess(app.client, settings.to_config(both), grid.parts(9)).contexts[1]
    assert client.read(context)[0].workers == workers


def test_an_option_of_another_version_is_refused(tmp_path):
    config = settings.to_config(settings.of({"data": "x"})) | {"lr-of-the-head": 0.1}
    with pytest.raises(ValueError, match="there is no option 'lr-of-the-head'"):
        settings.from_config(config, tmp_path / "plan.yaml")


def test_a_config_says_everything(tmp_path):
    both = settings.of({"mean": "1,2,3", "rounds": 7, "data": "x", "in_memory": True})
    config = settings.to_config(both)
    assert all(isinstance(v, str | int | float | bool) for v in config.values())
    assert settings.from_config(config, tmp_path / "plan.yaml") == both


def test_a_folder_is_for_one_server(photos, tmp_path, monkeypatch):
    from gradfilter.federated import folder

    monkeypatch.setattr(folder, "PATIENCE", 0.1)
    both = asked(photos, tmp_path / "run")
    with folder.alone(tmp_path / "run"), pytest.raises(ValueError, match="another server"):
        run(both)
    assert not (tmp_path / "run" / "result.json").exists()  # it would end the other one
