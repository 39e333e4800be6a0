"""A name that cannot be loaded is a one-line error at once, without network or cache; cached models still load."""

from __future__ import annotations

import socket

import pytest
from huggingface_hub import constants

from chatgpt import hub
from chatgpt.data.reading import read_records
from chatgpt.nn.loading import load_config, load_tokenizer


@pytest.fixture
def network(monkeypatch, tmp_path):
    """Sets an unreachable hub and an empty cache; returns the list of attempted connections."""
    tried = []

    def refuse(address, timeout):
        tried.append(address)
        raise OSError(111, 'Connection refused')

    monkeypatch.setattr(socket, 'create_connection', refuse)
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', False)
    monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path / 'cache'))
    monkeypatch.setattr(constants, 'ENDPOINT', 'https://hub.test')
    monkeypatch.setenv('HF_HUB_OFFLINE', '0')
    for name in ('https_proxy', 'all_proxy', 'HTTPS_PROXY', 'ALL_PROXY'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    hub.connect.cache_clear()
    yield tried
    hub.connect.cache_clear()


@pytest.mark.parametrize('load', [load_config, load_tokenizer, lambda name: list(read_records(name))])
def test_without_a_network_a_misspelt_name_is_one_line_after_one_try(network, tmp_path, load):
    (tmp_path / 'smollm2').mkdir()
    for name, words in (('smolm2', 'did you mean smollm2'), ('nobody/nothing', 'hub.test cannot be reached')):
        with pytest.raises(ValueError, match=words) as error:
            load(name)
        assert '\n' not in str(error.value)
        constants.HF_HUB_OFFLINE = False
    assert network == [('hub.test', 443)]


@pytest.mark.parametrize('proxy', ['http://proxy.test:3128', 'proxy.test:3128'])
def test_a_proxy_is_tried_in_place_of_the_hub(network, monkeypatch, proxy):
    monkeypatch.setenv('https_proxy', proxy)
    with pytest.raises(ValueError, match='proxy.test cannot be reached'):
        hub.check_name('nobody/nothing')
    assert network == [('proxy.test', 3128)]


def test_what_is_in_the_cache_is_loaded_without_a_network(network, tmp_path):
    snapshot = tmp_path / 'cache' / 'models--some--one' / 'snapshots' / 'abc'
    snapshot.mkdir(parents=True)
    (snapshot / 'config.json').write_text('{"model_type": "gpt2", "n_layer": 3}')
    (snapshot.parents[1] / 'refs').mkdir()
    (snapshot.parents[1] / 'refs' / 'main').write_text('abc')
    with pytest.warns(UserWarning, match='some/one is taken from the cache'):
        hub.check_name('some/one')
    assert constants.HF_HUB_OFFLINE
    assert load_config('some/one', cache_dir=tmp_path / 'cache').n_layer == 3
    assert len(network) == 1


def test_offline_there_is_no_connection(network, monkeypatch):
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
    with pytest.raises(ValueError, match='not asked under HF_HUB_OFFLINE=1'):
        hub.check_name('nobody/nothing')
    assert network == []
