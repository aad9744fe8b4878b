//! SPDK's target with one NVMe controller behind a vfio-user socket.

use super::super::scratch::Scratch;
use anyhow::{Context, Result, anyhow, bail, ensure};
use load::job::size;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::fs::File;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const NQN: &str = "nqn.2019-07.io.spdk:vnvme-bench";
const BLOCK: u64 = 512;
/// Time limit for the start of the process, which sets up its memory, and for its end.
const START_STOP_TIMEOUT: Duration = Duration::from_secs(60);
/// Memory of the process in MiB, beside the volume.
const MEMORY: u64 = 1024;

/// A running SPDK target, which is ended when this is dropped.
pub struct Spdk {
    child: Child,
    dir: Scratch,
}

/// Returns the method and parameters that create the volume's bdev, and the memory in bytes that it
/// takes.
fn bdev(volume: &str) -> Result<(Value, u64)> {
    let (scheme, name) = volume.split_once("://").unwrap_or(("", volume));
    let bytes = || size(name).map_err(|why| anyhow!("{volume}: {why}"));
    let made = |method: &str, params: Value| json!({"method": method, "params": params});
    let of = |method: &str, bytes: u64| {
        let blocks = bytes / BLOCK;
        made(
            method,
            json!({"name": "b", "num_blocks": blocks, "block_size": BLOCK}),
        )
    };
    Ok(match scheme {
        "null" => (of("bdev_null_create", bytes()?), 0),
        "mem" => (of("bdev_malloc_create", bytes()?), bytes()?),
        "" | "file" if Path::new(name).exists() => {
            let params = json!({"name": "b", "filename": name, "block_size": BLOCK});
            (made("bdev_aio_create", params), 0)
        }
        _ => {
            bail!("{volume}: SPDK is compared on null://, mem:// and file volumes without options")
        }
    })
}

/// Refuses volumes that SPDK does not have.
pub fn check(volume: &str) -> Result<()> {
    bdev(volume).map(drop)
}

/// Returns the configuration of a target with the volume, whose socket is in `dir`.
fn config(bdev: &Value, dir: &Path) -> Value {
    let method = |name: &str, params: Value| json!({"method": name, "params": params});
    let namespace = json!({"nsid": 1, "bdev_name": "b"});
    let address = json!({"trtype": "VFIOUSER", "traddr": dir, "trsvcid": "0"});
    let subsystem = json!({"nqn": NQN, "allow_any_host": true, "serial_number": "SPDK0"});
    json!({"subsystems": [
        {"subsystem": "bdev", "config": [bdev]},
        {"subsystem": "nvmf", "config": [
            method("nvmf_create_transport", json!({"trtype": "VFIOUSER"})),
            method("nvmf_create_subsystem", subsystem),
            method("nvmf_subsystem_add_ns", json!({"nqn": NQN, "namespace": namespace})),
            method("nvmf_subsystem_add_listener", json!({"nqn": NQN, "listen_address": address})),
        ]},
    ]})
}

impl Spdk {
    /// Starts the target on a CPU, and waits until it listens.
    pub fn start(program: &Path, volume: &str, cpu: usize) -> Result<Self> {
        let (bdev, memory) = bdev(volume)?;
        let dir = Scratch::new()?;
        let path = dir.path().join("config.json");
        std::fs::write(&path, config(&bdev, dir.path()).to_string())?;
        let log = File::create(dir.path().join("log"))?;
        let child = Command::new(program)
            .arg("-c")
            .arg(&path)
            .args(["-m", &format!("[{cpu}]"), "--no-huge"])
            .args(["-s", &(MEMORY + memory.div_ceil(1 << 20)).to_string()])
            .arg("-r")
            .arg(dir.path().join("rpc.sock"))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| program.display().to_string())?;
        let mut spdk = Self { child, dir };
        let began = Instant::now();
        while UnixStream::connect(spdk.socket()).is_err() {
            if let Some(status) = spdk.child.try_wait()? {
                bail!("SPDK's target ended ({status}): {}", spdk.log());
            }
            let is_late = began.elapsed() > START_STOP_TIMEOUT;
            ensure!(!is_late, "SPDK's target does not listen: {}", spdk.log());
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(spdk)
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("cntrl")
    }

    /// Returns the driver's URL of the namespace.
    pub fn url(&self) -> String {
        format!("vfio-user://{}/1", self.socket().display())
    }

    fn log(&self) -> String {
        let text = std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
        let lines: Vec<&str> = text.lines().rev().take(5).collect();
        lines.into_iter().rev().collect::<Vec<_>>().join(" | ")
    }
}

impl Drop for Spdk {
    fn drop(&mut self) {
        if let Some(pid) = Pid::from_raw(self.child.id() as i32) {
            let _ = kill_process(pid, Signal::TERM);
        }
        let began = Instant::now();
        while began.elapsed() < START_STOP_TIMEOUT {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volume_becomes_spdk_bdev() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().display().to_string();
        for (volume, method) in [
            ("null://1M", "bdev_null_create"),
            ("mem://1M", "bdev_malloc_create"),
            (&path, "bdev_aio_create"),
            (&format!("file://{path}"), "bdev_aio_create"),
        ] {
            let (made, _) = bdev(volume).unwrap();
            assert_eq!(made["method"], method, "{volume}");
            let whole = config(&made, Path::new("/d"));
            let listener = whole.pointer("/subsystems/1/config/3/params/listen_address/traddr");
            assert_eq!(listener.unwrap(), "/d");
        }
        assert_eq!(bdev("null://1M").unwrap().0["params"]["num_blocks"], 2048);
        for volume in ["nbd://h", "/none.raw", "null://x", "null://1M?iops=1"] {
            assert!(bdev(volume).is_err(), "{volume}");
        }
    }
}
