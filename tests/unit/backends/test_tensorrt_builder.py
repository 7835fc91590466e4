"""The timing cache's file under several builds at once: nothing timed is lost. The library's cache is a set of words here."""

from concurrent.futures import ThreadPoolExecutor

from optpipe.backends.tensorrt_builder import write_timing_cache

MARK = b"ptrtd\0\0\0"


class Cache:
    """As TensorRT's ITimingCache: it combines with one of the same GPU, and refuses another's."""

    def __init__(self, content):
        self.gpu, *words = content.removeprefix(MARK).decode().split()
        self.words = set(words)

    def serialize(self):
        return MARK + " ".join([self.gpu, *sorted(self.words)]).encode()

    def combine(self, other, ignore_mismatch):
        assert not ignore_mismatch
        if other.gpu != self.gpu:
            return False
        self.words |= other.words
        return True


class Config:
    def __init__(self, gpu, *words):
        self._cache = Cache(MARK + " ".join([gpu, *words]).encode())

    def create_timing_cache(self, content):
        return Cache(content or MARK + self._cache.gpu.encode())

    def get_timing_cache(self):
        return self._cache


def test_builds_at_once_lose_nothing_that_one_of_them_timed(tmp_path) -> None:
    file = tmp_path / "timings"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda index: write_timing_cache(Config("h200", f"kernel{index}"), file), range(40)))
    assert Cache(file.read_bytes()).words == {f"kernel{index}" for index in range(40)}
    assert sorted(path.name for path in tmp_path.iterdir()) == [".timings.lock", "timings"]


def test_the_cache_of_another_gpu_is_left_as_it_is(tmp_path, capsys) -> None:
    file = tmp_path / "timings"
    write_timing_cache(Config("h200", "one"), file)
    before = file.read_bytes()
    write_timing_cache(Config("l40s", "two"), file)
    assert file.read_bytes() == before
    assert "of another GPU or version by now, and is left as it is" in capsys.readouterr().out
