"""What is an address, and that none with a secret gets any further, nor into a sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megahead.commands import checkpoint_path
from megahead.config.loading import config_from_checkpoint, config_from_dict
from megahead.errors import ConfigErrors, FieldError, UserError
from megahead.remote_files import RemoteError, Store, error_summary, is_below, is_remote, refuse_secrets, split_url
from support.small_run import small_config

SECRETS = (
    "s3://AKIAID:hush/hush+hush@bucket/run",
    "sftp://user:hushhush@host/run",
    "https://host/text?X-Amz-Signature=hushhush",
    "s3://bucket/run&secret=hushhush",
    "az://box/run;sig=hushhush",
    "simplecache::s3://AKIAID:hush/hush@bucket/run",
)
RULE = "must be an address without password, key or query, but is one that has some instead; give credentials by the"


def test_a_url_is_far_and_a_path_is_not() -> None:
    assert [is_remote(name) for name in ("s3://b/x", "gs://b", "file:///x", "memory://x")] == [True] * 4
    assert [is_remote(name) for name in ("x", "/x/y", "C:/x", "a:b//c", "./s3://b")] == [False] * 5


def test_a_folder_is_below_itself_but_not_below_one_whose_name_it_continues() -> None:
    assert is_below("s3://b/run/checkpoints", "s3://b/run/")
    assert is_below("s3://b/run", "s3://b/run/")
    assert not is_below("s3://b/run2", "s3://b/run")


def test_a_place_on_a_disk_may_be_written_in_several_ways() -> None:
    for other in ("file:///a//b/", "file:////a/./b/step-3", "local:///a/c/../b"):
        assert is_below(other, "file:///a/b")
    assert not is_below("file:///a/bc", "file:///a/b")
    assert not is_below("s3://a//b", "s3://a/b")


def test_settings_of_ones_own_that_were_saved_with_an_address_still_open(tmp_path: Path) -> None:
    custom = {"objective": "mine.py:Mine", "settings": {"pages": ["https://host/page?id=7"], "pattern": "end$text"}}
    saved = small_config(tmp_path).model_dump(mode="json")
    saved["objective"]["custom"] = custom
    assert config_from_checkpoint(saved, "a checkpoint").objective.custom.settings == custom["settings"]
    with pytest.raises(ConfigErrors, match=f"`objective.custom.settings` {RULE}"):
        config_from_dict(saved)


@pytest.mark.parametrize("url", SECRETS)
def test_no_secret_gets_into_a_config_a_store_or_a_sentence(url: str, tmp_path: Path) -> None:
    with pytest.raises(FieldError, match=RULE) as refusal:
        refuse_secrets("field", url)
    told_to_user = [str(refusal.value)]
    for field in ("training.remote_checkpoints", "data.train", "data.tokenizer", "training.steps", "output_dir"):
        with pytest.raises(ConfigErrors, match=f"`{field}` {RULE}") as mistakes:
            small_config(tmp_path, {field: url})
        told_to_user.append(str(mistakes.value))
    for override, sentence in (
        (f"data.train=['{url}']", f"`data.train` {RULE}"),
        (f"data.train={{'train': {{'prefix': '{url}'}}}}", "data.train"),
        (f"training=[{{'remote_checkpoints': '{url}'}}]", "`training` must be a section of settings, but is "),
        (f".train={url}", "`--set` must look like section.field=value, but is "),
    ):
        with pytest.raises(UserError, match=re.escape(sentence)) as mistakes:
            config_from_dict(small_config(tmp_path).model_dump(mode="json"), overrides=[override])
        told_to_user.append(str(mistakes.value))
    for open_it in (Store, checkpoint_path):
        with pytest.raises(UserError, match=RULE) as refused:
            open_it(url)
        assert not isinstance(refused.value, ValueError)  # which argparse would answer with the whole argument
        told_to_user.append(str(refused.value))
    assert "hush" not in "".join(told_to_user)


def test_roots_are_addresses_as_well(tmp_path: Path) -> None:
    assert split_url("s3://bucket/a/b.json") == ("s3://bucket/a", "b.json")
    assert [split_url(name) for name in ("file:///b.json", "memory://b.json")] == [
        ("file:///", "b.json"),
        ("memory://", "b.json"),
    ]
    assert Store("file:///").size(str(Path(__file__).relative_to("/"))) == Path(__file__).stat().st_size
    assert Store("memory://").sizes("nothing") == {}
    for url in (f"file://{tmp_path}", f"file://{tmp_path}/", f"file://{tmp_path}//", f"file://{tmp_path}/a/../"):
        Store(url).write("sp ace/ü#[1]*", b"content")
        assert Store(url).sizes("") == Store(url).sizes("sp ace") == {"sp ace/ü#[1]*": 7}


def test_addresses_that_may_mean_another_place_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`file://mnt/run` would be in the folder of each process, perhaps on the disk that is to be mirrored."""
    monkeypatch.chdir(tmp_path)
    for url in ("file://mnt/run", "local://mnt/run", "file://"):
        with pytest.raises(RemoteError, match=rf"`{url}` must be an absolute path, but is relative"):
            Store(url).write("file", b"content")
    assert not list(tmp_path.iterdir())
    for url in ("s3://bucket//run", "gs://bucket/runs//mine/"):
        with pytest.raises(
            RemoteError, match="must have single slashes, but has two that follow each other; leave one"
        ):
            Store(url)
    with pytest.raises(
        RemoteError, match=r"must be one address, but is a chain of them \(`::`\); give the last one alone"
    ):
        Store(f"simplecache::file://{tmp_path}")


def test_addresses_without_secrets_pass(tmp_path: Path) -> None:
    for url in ("s3://bucket/runs/a", "abfs://box@account.dfs.core.windows.net/run", "sftp://user@host:22/run"):
        assert small_config(tmp_path, {"training.remote_checkpoints": url}).training.remote_checkpoints == url


def test_a_mirror_is_an_address_and_a_run_trains_on_a_disk(tmp_path: Path) -> None:
    rule = r"`training\.remote_checkpoints` must be an address such as s3://BUCKET/FOLDER, but is 'runs/copy' instead"
    with pytest.raises(ConfigErrors, match=rule):
        small_config(tmp_path, {"training.remote_checkpoints": "runs/copy"})
    with pytest.raises(
        ConfigErrors, match=r"`output_dir` must be a folder of a disk, .* copied to training\.remote_checkpoints"
    ):
        small_config(tmp_path, {"output_dir": "s3://bucket/run"})


def test_what_a_store_says_is_told_without_the_secrets_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hushhush")
    error = PermissionError("denied for hushhush at https://host/x?Signature=abc\nand more")
    assert error_summary(error) == "PermissionError: denied for *** at https://host/x?***"
    unreachable = ConnectionError('no answer from "http://me:quiet@proxy:3128", "http://:quiet@proxy" or s3://b/a@b')
    assert (
        error_summary(unreachable)
        == 'ConnectionError: no answer from "http://***@proxy:3128", "http://***@proxy" or s3://b/a@b'
    )
    assert error_summary(OSError("s3://b/x: denied for me@corp")) == "OSError: s3://b/x: denied for me@corp"


def test_what_is_missing_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    def missing(url: str, **options: object) -> None:
        raise ImportError("Install the package to access it")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(RemoteError, match=r"needs a package that is missing .*; pip install -e '\.\[remote\]'\.$"):
        Store("s3://bucket/run")
    with pytest.raises(RemoteError, match=f"; pip install 'gcsfs=={fsspec.__version__}'"):
        Store("gs://bucket/run")
    with pytest.raises(RemoteError, match=r"; pip install adlfs\.$"):
        Store("az://bucket/run")
    monkeypatch.undo()
    with pytest.raises(RemoteError, match="must be of a kind that fsspec knows"):
        Store("nowhere://bucket/run")
