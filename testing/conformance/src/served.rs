//! `vnvme` as a child process that serves the suite's disks: a plain one (with a controller memory
//! buffer and boot partitions), and disks for namespace management, placement handles, metadata,
//! zones, and two disks of one subsystem.

use crate::bytes::pattern;
use crate::suite::TestTarget;
use rustix::process::{Pid, Signal, kill_process};
use std::fs::{self, File};
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Time limit for the started program to listen on its sockets.
const START: Duration = Duration::from_secs(60);
/// Time limit for the program to end.
const END: Duration = Duration::from_secs(60);

/// Running `vnvme` with disks for the cases, which is ended on drop.
pub struct ServedProgram {
    child: Child,
    dir: TempDir,
}

/// Serves on sockets in a new directory.
///
/// # Errors
/// The program cannot be started, or does not listen within a minute.
pub fn start(program: &Path) -> io::Result<ServedProgram> {
    let dir = tempfile::tempdir()?;
    let path = |name: &str| dir.path().join(name);
    for name in ["first.raw", "second.raw"] {
        File::create(path(name))?.set_len(64 << 20)?;
    }
    fs::write(path("boot.bin"), pattern(1, 200_000))?;
    let text = |name: &str| format!("{:?}", path(name).display().to_string());
    let mut config = format!(
        "[[controller]]\nname = \"alone\"\nsocket = {}\nmax-namespaces = 4\ncmb-size = \"1M\"\n\
         boot-partition = {}\n\
         [[controller.namespace]]\nvolume = \"mem://64M\"\nblock-size = 512\nformat-file = {}\n\
         [[controller.namespace]]\nvolume = \"mem://64M\"\nblock-size = 4096\n",
        text("alone.sock"),
        text("boot.bin"),
        text("alone.format")
    );
    fs::create_dir(path("namespaces"))?;
    config += &format!(
        "[[controller]]\nname = \"pool\"\nsocket = {}\nmax-namespaces = 4\npool = {}\n\
         pool-capacity = \"64M\"\n\
         [[controller.namespace]]\nvolume = \"mem://64M\"\nblock-size = 512\n",
        text("pool.sock"),
        text("namespaces")
    );
    config += &format!(
        "[[controller]]\nname = \"placed\"\nsocket = {}\nmax-namespaces = 4\n\
         [[controller.namespace]]\nvolume = \"mem://64M\"\nblock-size = 512\n\
         fdp-handles = 4\nfdp-unit = \"1M\"\nfdp-table = {}\n\
         [[controller.namespace]]\nvolume = \"mem://64M\"\nblock-size = 4096\n",
        text("placed.sock"),
        text("placed.fdp")
    );
    config += &format!(
        "[[controller]]\nname = \"protected\"\nsocket = {}\nmax-namespaces = 5\n\
         [[controller.namespace]]\nvolume = \"mem://64M\"\nblock-size = 512\n\
         [[controller.namespace]]\nvolume = \"mem://64M\"\nblock-size = 4096\n\
         metadata-size = 8\nprotection = 1\nmetadata = {}\n\
         [[controller.namespace]]\nvolume = \"mem://64M\"\nblock-size = 512\n\
         metadata-size = 16\nmetadata-extended = true\nmetadata = {}\n\
         [[controller.namespace]]\nvolume = \"mem://64M\"\nblock-size = 4096\n\
         metadata-size = 16\nprotection = 1\nguard = 64\nmetadata = {}\n",
        text("protected.sock"),
        text("protected.metadata"),
        text("extended.metadata"),
        text("guard.metadata")
    );
    config += &format!(
        "[[controller]]\nname = \"zoned\"\nsocket = {}\nmax-namespaces = 4\nmdts = 7\n\
         [[controller.namespace]]\nvolume = \"mem://64M\"\nblock-size = 512\n\
         [[controller.namespace]]\nvolume = \"mem://16M\"\nblock-size = 512\n\
         zone-size = \"1M\"\nzone-capacity = \"768K\"\nmax-open-zones = 4\n\
         max-active-zones = 6\nzone-table = {}\n\
         [[controller.namespace]]\nvolume = \"mem://32M\"\nblock-size = 4096\n\
         zone-size = \"2M\"\nzrwa-size = \"64K\"\nzrwa-granularity = \"16K\"\n\
         zrwa-resources = 3\nzone-table = {}\n",
        text("zoned.sock"),
        text("limited.zones"),
        text("areas.zones")
    );
    for (name, cntlid) in [("one", 1), ("two", 2)] {
        config += &format!(
            "[[controller]]\nname = \"{name}\"\nsocket = {}\nsubsystem = \"conformance\"\n\
             cntlid = {cntlid}\nmax-namespaces = 4\n",
            text(&format!("{name}.sock"))
        );
        for (volume, size) in [("first", 512), ("second", 4096)] {
            config += &format!(
                "[[controller.namespace]]\nvolume = {}\nblock-size = {size}\nreservations = {}\n\
                 format-file = {}\n",
                text(&format!("{volume}.raw")),
                text(&format!("{volume}.reservations")),
                text(&format!("{volume}.format"))
            );
        }
    }
    fs::write(path("vnvme.toml"), config)?;
    let child = Command::new(program)
        .args(["--log", "warn", "serve", "--config"])
        .arg(path("vnvme.toml"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()?;
    let mut served = ServedProgram { child, dir };
    served.wait()?;
    Ok(served)
}

impl ServedProgram {
    fn wait(&mut self) -> io::Result<()> {
        let deadline = Instant::now() + START;
        for name in [
            "alone",
            "pool",
            "placed",
            "protected",
            "zoned",
            "one",
            "two",
        ] {
            while UnixStream::connect(self.socket(name)).is_err() {
                if let Some(status) = self.child.try_wait()? {
                    let text = format!("the program has ended: {status}");
                    return Err(io::Error::other(text));
                }
                if Instant::now() > deadline {
                    return Err(io::Error::other("the program does not listen"));
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        Ok(())
    }

    fn socket(&self, name: &str) -> PathBuf {
        self.dir.path().join(format!("{name}.sock"))
    }

    /// Returns the target with the plain disk.
    pub fn alone(&self) -> TestTarget {
        TestTarget {
            socket: self.socket("alone"),
            second: None,
        }
    }

    /// Returns the target with the disk on which the host creates namespaces.
    pub fn pool(&self) -> TestTarget {
        TestTarget {
            socket: self.socket("pool"),
            second: None,
        }
    }

    /// Returns the target with the disk that has placement handles.
    pub fn placed(&self) -> TestTarget {
        TestTarget {
            socket: self.socket("placed"),
            second: None,
        }
    }

    /// Returns the target with the disk that has metadata.
    pub fn protected(&self) -> TestTarget {
        TestTarget {
            socket: self.socket("protected"),
            second: None,
        }
    }

    /// Returns the target with the zoned disk.
    pub fn zoned(&self) -> TestTarget {
        TestTarget {
            socket: self.socket("zoned"),
            second: None,
        }
    }

    /// Returns the target with the two disks of one subsystem.
    pub fn shared(&self) -> TestTarget {
        TestTarget {
            socket: self.socket("one"),
            second: Some(self.socket("two")),
        }
    }

    /// Returns whether the program still runs, as it must after any action of a host.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }
}

impl Drop for ServedProgram {
    /// Ends the program by SIGTERM: after a SIGKILL a stand-by of its keeper would go on serving.
    fn drop(&mut self) {
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        let deadline = Instant::now() + END;
        while self.is_running() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
