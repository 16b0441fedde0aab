"""Programs that people use, in a sandbox as it comes: each works, or stands in docs/limits.md with the reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec.images.debian import debian_root_tar
from libdsec import DSecClient, DSecContainerRunArgs, Sandbox
from tests.conftest import ROOT, Instance

PACKAGES = (
    "python3", "python3-pip", "python3-venv", "git", "sudo", "gcc", "libc6-dev", "make", "strace", "gdb", "nodejs",
    "default-jre-headless", "apt-utils", "procps", "util-linux", "dpkg-dev",
)  # fmt: skip


@pytest.fixture(scope="session")
def tools_image(instance: Instance) -> str:
    tar = debian_root_tar(PACKAGES, cache=ROOT / ".cache" / "roots")

    async def load(path: Path) -> None:
        async with DSecClient(instance.url, instance.api_key) as client:
            await client.images.import_(path, name="tools:test", kind="base")

    asyncio.run(load(tar))
    return "tools:test"


@pytest.fixture
async def tools(client: DSecClient, tools_image: str) -> AsyncIterator[Sandbox]:
    made = await client.run_container(DSecContainerRunArgs(container_image=tools_image, memory_limit_mb=2048))
    yield made
    await made.stop()


CASES = {
    "sudo": ("useradd -m u && echo 'u ALL=(ALL) NOPASSWD: ALL' > /etc/sudoers.d/u && su u -c 'sudo id -u'", "0\n"),
    "setuid": ("cp /usr/bin/id /tmp/id && chmod u+s /tmp/id && useradd -m v && su v -c '/tmp/id -u'", "0\n"),
    "git": (
        "cd /tmp && git init -q r && cd r && echo a > f && git add f && git -c user.name=n -c user.email=e@x commit -qm m && git log --format=%s",
        "m\n",
    ),
    "gcc -j": (
        'mkdir /b && cd /b && for i in 1 2 3 4; do echo "int f$i(void){return $i;}" > f$i.c; done;'
        " echo 'int f1(void),f4(void);int main(void){return f1()+f4()-5;}' > m.c;"
        " printf 'a: f1.o f2.o f3.o f4.o m.o\\n\\tgcc -o a $^\\n' > Makefile; make -s -j4 && ./a && echo built",
        "built\n",
    ),
    "strace": ("strace -f -o /tmp/t sh -c 'echo traced' && grep -c execve /tmp/t >/dev/null && echo yes", "traced\nyes\n"),
    "gdb": ("gdb -batch -ex run -ex 'print 6*7' --args /bin/true 2>/dev/null | grep -o '= 42'", "= 42\n"),
    "node": ("node -e 'console.log([1,2,3].map(x=>x*2).join())'", "2,4,6\n"),
    "java": ("java -XshowSettings:vm -version >/tmp/j 2>&1 && echo ran", "ran\n"),
    "pip from a local wheel": (
        "mkdir -p /w/pkg_x && cd /w && echo 'V=5' > pkg_x/__init__.py &&"
        ' printf \'from setuptools import setup\\nsetup(name="pkg_x",version="1",packages=["pkg_x"])\\n\' > setup.py &&'
        " python3 -m venv --system-site-packages /v >/dev/null && /v/bin/pip wheel -q --no-build-isolation --no-index -w /dist . &&"
        " /v/bin/pip install -q --no-index --find-links /dist pkg_x && cd / && /v/bin/python -c 'import pkg_x; print(pkg_x.V)'",
        "5\n",
    ),
    "apt from a local repository": (
        "mkdir -p /repo/p/DEBIAN /repo/p/usr/share && printf 'Package: tinything\\nVersion: 1\\nArchitecture: all\\nMaintainer: n <n@x>\\nDescription: t\\n'"
        " > /repo/p/DEBIAN/control && echo x > /repo/p/usr/share/tinything && cd /repo && dpkg-deb -b p tinything_1_all.deb >/dev/null &&"
        " dpkg-scanpackages . > Packages 2>/dev/null && echo 'deb [trusted=yes] file:/repo ./' > /etc/apt/sources.list &&"
        " rm -f /etc/apt/sources.list.d/* && apt-get update -qq >/dev/null 2>&1 && apt-get install -y -qq tinything >/dev/null 2>&1 && cat /usr/share/tinything",
        "x\n",
    ),
    "chown and tar keep owners": (
        "cd /tmp && touch o && chown 1000:1001 o && tar cf o.tar o && rm o && tar xf o.tar && stat -c %u:%g o",
        "1000:1001\n",
    ),
    "threads and shared memory": ('python3 -c "from multiprocessing import Pool;print(sum(Pool(4).map(abs,range(-9,0))))"', "45\n"),
    "rename of a directory from a layer": ("mv /usr/share/doc /usr/share/doc2 && ls -d /usr/share/doc2", "/usr/share/doc2\n"),
}


@pytest.mark.parametrize("name", CASES)
async def test_program_works(tools: Sandbox, name: str) -> None:
    command, expected = CASES[name]
    result = await tools.exec(command, timeout=180)
    assert (result.exit_code, result.stdout) == (0, expected), result.stderr[-2000:]
