"""The configuration: three layers, closed keys, messages that say what to change."""

from pathlib import Path

import pytest

from core.config import DEFAULT_MODEL, child_environment, dump_config, load_config, parse_config, read_secret
from core.errors import ConfigError
from core.types import Role


def test_the_default_is_one_model_with_a_prefill_and_a_decode_pool() -> None:
    config = load_config(environ={})
    assert [model.name for model in config.models] == [DEFAULT_MODEL]
    assert set(config.models[0].pools) == {Role.PREFILL, Role.DECODE}


def test_set_wins_over_environment_which_wins_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "baton.yaml"
    path.write_text("router: {heartbeat_s: 0.1, heartbeat_timeout_s: 9, max_waiting: 1}\n")
    environ = {"BATON__ROUTER__HEARTBEAT_S": "0.2", "BATON__ROUTER__MAX_WAITING": "2", "OTHER": "x"}
    config = load_config(str(path), overrides=["router.max_waiting=3"], environ=environ)
    assert config.router.heartbeat_timeout_s == 9
    assert config.router.heartbeat_s == 0.2
    assert config.router.max_waiting == 3


def test_list_items_are_addressed_by_number() -> None:
    config = load_config(overrides=["models.0.kv.block_size=32", "models.1={name: b, path: b}"], environ={})
    assert config.models[0].kv.block_size == 32
    assert config.models[1].name == "b"


def test_what_is_dumped_loads_to_the_same(tmp_path: Path) -> None:
    config = load_config(overrides=["models.0.pools={unified: {replicas: 3}}", "transfer.digest=off"], environ={})
    path = tmp_path / "effective.yaml"
    path.write_text(dump_config(config))
    assert load_config(str(path), environ={}) == config


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("routr.listen=x", "routr: unknown key; known here: models, gateway, router"),
        ("models.0.kv.blocksize=3", "models.0.kv.blocksize: unknown key; known here: block_size"),
        ("gateway.listen=80", "gateway.listen"),
        ("gateway.listen=localhost", "HOST:PORT"),
        ("models.0.pools={prefill: {}}", "'decode' is missing"),
        ("models.0.pools={}", "at least one pool"),
        ("models=[]", "at least one model"),
        ("models=[{name: a}, {name: a}]", "two models are named 'a'"),
        ("transfer.renew_s=14", "at most half of lease_s"),
        ("router.heartbeat_timeout_s=0.6", "at least twice heartbeat_s"),
        ("models.0.kv.num_blocks=1", "at least 2"),
        ("models.0.kv.block_size={", "is not a YAML value"),
        ("models.5.name=x", "is not the number of an item"),
        ("router={listen: {port: 1}}", "router.listen"),
        ("nonsense", "is not KEY=VALUE"),
    ],
)
def test_a_bad_setting_is_one_line_that_names_the_key(override: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=[override], environ={})
    assert named in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "10.0.0.1", "gateway.internal", "127.0.0.1.example.org", "0"])
def test_without_keys_only_this_machine_is_served(host: str) -> None:
    listen = f"gateway.listen='{host}:8000'"
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=[listen], environ={})
    assert "gateway.access.database" in caught.value.message
    config = load_config(overrides=[listen, "gateway.access.database=keys.db"], environ={})
    assert config.gateway.listen == f"{host}:8000"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "[::1]", "localhost"])
def test_this_machine_is_served_without_keys(host: str) -> None:
    assert not load_config(overrides=[f"gateway.listen='{host}:8000'"], environ={}).gateway.access.has_keys


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("database=postgresql://u:hush@h/db", "database_password_file"),
        ("database=postgresql://h/db?password=hush", "BATON_DATABASE_PASSWORD"),
        ("limits_store=redis://:hush@h/0", "limits_password_file"),
        ("database=mysql://u:hush@h/db", "postgresql://"),
        ("limits_store=memcached://hush", "redis://"),
        ("limits_store=redis://hush:port/0", "SCHEME://HOST:PORT"),
        ("limits_store=redis:///0", "SCHEME://HOST:PORT"),
        ("database=postgresql://[hush/db", "SCHEME://HOST:PORT"),
    ],
)
def test_no_password_stands_in_a_configuration(setting: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=[f"gateway.access.{setting}"], environ={})
    assert told in caught.value.message
    assert "hush" not in caught.value.message


def test_a_secret_is_read_from_a_file_or_else_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_ADMIN_KEY", "from the environment")
    path = tmp_path / "secret"
    path.write_text(" from a file\n")
    assert read_secret("BATON_ADMIN_KEY", None) == "from the environment"
    assert read_secret("BATON_ADMIN_KEY", str(path)) == "from a file"
    path.write_text("\n")
    for bad in (path, tmp_path / "none"):
        with pytest.raises(ConfigError, match=str(bad)):
            read_secret("BATON_ADMIN_KEY", str(bad))


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [", "\xff"])
def test_a_bad_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        load_config(str(path), environ={})
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(str(tmp_path / "absent.yaml"), environ={})


def test_children_do_not_inherit_settings_that_are_already_in_their_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON__ROUTER__LISTEN", "127.0.0.1:1")
    environ = child_environment({"A": "b"})
    assert "BATON__ROUTER__LISTEN" not in environ
    assert environ["A"] == "b"


def test_a_setting_of_one_default_pool_keeps_the_other() -> None:
    config = load_config(overrides=["models.0.pools.decode.replicas=2"], environ={})
    assert {role: pool.replicas for role, pool in config.models[0].pools.items()} == {Role.PREFILL: 1, Role.DECODE: 2}
    config = load_config(overrides=["models.0.pools.unified.replicas=2"], environ={})
    assert set(config.models[0].pools) == {Role.UNIFIED}


def test_several_gateways_with_keys_need_a_store_that_they_share() -> None:
    access: dict[str, object] = {"database": "keys.db"}
    with pytest.raises(ConfigError, match="name a store that they share"):
        parse_config({"gateway": {"processes": 2, "access": access}})
    access["limits_store"] = "redis://127.0.0.1:1/0"
    assert parse_config({"gateway": {"processes": 2, "access": access}}).gateway.processes == 2
    assert parse_config({"gateway": {"processes": 2}}).gateway.processes == 2


@pytest.mark.parametrize(
    ("advertise", "dialled"),
    [
        ("auto", "0.0.0.0:7123"),
        ("10.0.0.7", "10.0.0.7:7123"),
        ("10.0.0.7:900", "10.0.0.7:900"),
        ("[::1]", "[::1]:7123"),
    ],
)
def test_a_worker_is_dialled_where_it_says(advertise: str, dialled: str) -> None:
    worker = parse_config({"models": [{"name": "m"}], "worker": {"advertise": advertise}}).worker
    assert worker.advertised("0.0.0.0:7123") == dialled


@pytest.mark.parametrize("advertise", ["0.0.0.0", "10.0.0.7:port", "[::]:80"])
def test_a_worker_advertises_what_can_be_dialled(advertise: str) -> None:
    with pytest.raises(ConfigError, match=r"can dial|HOST:PORT"):
        parse_config({"models": [{"name": "m"}], "worker": {"advertise": advertise}})


def test_a_gpu_wants_a_backend_that_reaches_it() -> None:
    on_gpu = ["models.0.pools.decode.device=cuda"]
    assert load_config(overrides=on_gpu, environ={}).models[0].pools[Role.DECODE].device == "cuda"
    with pytest.raises(ConfigError, match=r"'tcp' does not reach the memory of a GPU .*decode.*: set it to nixl"):
        load_config(overrides=[*on_gpu, "transfer.backend=tcp"], environ={})
