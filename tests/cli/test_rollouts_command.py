"""The word `rollouts`."""

from __future__ import annotations

from command_line import call


def test_it_serves_runs_that_have_recordings_and_names_one_that_has_none(monkeypatch, capsys, tmp_path):
    served = []
    monkeypatch.setattr('chatgpt.launch.cli.rollouts.serve', lambda app, host, port: served.append((host, port)))
    runs = [tmp_path / name / 'rollouts' for name in ('one', 'two')]
    for run in runs:
        run.mkdir(parents=True)
        (run / 'phase-00000001.parquet').touch()
    assert call(monkeypatch, 'rollouts', *(str(run.parent) for run in runs), '--port=0') == 0
    assert served == [('127.0.0.1', 0)]
    (tmp_path / 'metrics.jsonl').write_text('{"step": 1}\n')
    assert call(monkeypatch, 'rollouts', str(tmp_path)) == 2
    assert f'{tmp_path} has no recorded sequences: give the folder of a run' in capsys.readouterr().err
    assert call(monkeypatch, 'rollouts', str(tmp_path / 'nothing')) == 2
    assert f'{tmp_path / "nothing"}: there is no such folder' in capsys.readouterr().err
    assert call(monkeypatch, 'rollouts') == 2 and len(served) == 1
