//! Suite `guest`: fio as in the document of QEMU's shadow doorbell series, against vnvme with
//! shadow doorbells off and on, polling as it does by itself and always sleeping, and against
//! QEMU's own controller with `dbcs` off and on.
//!
//! The guest has one virtual processor, so that a controller has a core of its own, and all
//! disks, so that nothing else differs. MMIO doorbells of vnvme are its own counters; those of
//! QEMU's controller are counted by its trace events, in a guest of their own and a shorter run,
//! because tracing costs time.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use harness::cache::Cache;
use harness::daemon::{Daemon, program};
use harness::progress::say;
use harness::{BenchOptions, Firmware, Guest};
use serde_json::Value;

use crate::figures::Figures;
use crate::report::JobFigures;

const DEPTHS: [u32; 5] = [1, 2, 4, 8, 32];
const SIZE: &str = "64G";
const FILE_SIZE: usize = 256 << 20;
/// Time without I/O in the guest while the daemons' CPU time is measured.
const IDLE: Duration = Duration::from_secs(30);

/// A disk that is compared.
struct Disk {
    case: &'static str,
    serial: &'static str,
    by: By,
}

/// Emulator of the disk's controller.
enum By {
    Vnvme {
        shadow: bool,
        /// Time for which the worker polls after the last work, in microseconds; `None`: the
        /// default.
        window: Option<u32>,
        below: BackingVolume,
    },
    Qemu {
        dbcs: &'static str,
    },
}

/// Volume below one of vnvme's disks.
#[derive(Clone, Copy)]
enum BackingVolume {
    Null,
    /// A file of [`FILE_SIZE`] that holds data.
    File,
}

const DISKS: [Disk; 6] = [
    vnvme(
        "vnvme shadow off",
        "vnvme-off",
        false,
        None,
        BackingVolume::Null,
    ),
    vnvme(
        "vnvme shadow on",
        "vnvme-on",
        true,
        None,
        BackingVolume::Null,
    ),
    vnvme(
        "vnvme shadow on sleeping",
        "vnvme-sleeping",
        true,
        Some(0),
        BackingVolume::Null,
    ),
    vnvme("vnvme file", "vnvme-file", true, None, BackingVolume::File),
    qemu("qemu dbcs off", "qemu-off", "off"),
    qemu("qemu dbcs on", "qemu-on", "on"),
];

const fn vnvme(
    case: &'static str,
    serial: &'static str,
    shadow: bool,
    window: Option<u32>,
    below: BackingVolume,
) -> Disk {
    Disk {
        case,
        serial,
        by: By::Vnvme {
            shadow,
            window,
            below,
        },
    }
}

const fn qemu(case: &'static str, serial: &'static str, dbcs: &'static str) -> Disk {
    Disk {
        case,
        serial,
        by: By::Qemu { dbcs },
    }
}

/// A `vnvme serve` with counters.
struct BenchDaemon {
    daemon: Daemon,
    control: PathBuf,
    _dir: tempfile::TempDir,
}

impl BenchDaemon {
    /// Serves the disk, if it is one of vnvme's.
    fn start(disk: &Disk) -> Result<Option<BenchDaemon>> {
        let By::Vnvme {
            shadow,
            window,
            below,
        } = disk.by
        else {
            return Ok(None);
        };
        let dir = tempfile::Builder::new().prefix("vnvme-").tempdir()?;
        let control = dir.path().join("control");
        let mut daemon = Daemon::builder(disk.serial)
            .arg("--serial")
            .arg(disk.serial)
            .arg("--control")
            .arg(&control);
        if !shadow {
            daemon = daemon.arg("--no-shadow-doorbells");
        }
        if let Some(micros) = window {
            daemon = daemon.arg("--idle-window").arg(micros.to_string());
        }
        let volume = match below {
            BackingVolume::Null => format!("null://{SIZE}"),
            BackingVolume::File => {
                let path = dir.path().join("disk.raw");
                fs::write(&path, vec![0xa5; FILE_SIZE])?;
                path.display().to_string()
            }
        };
        Ok(Some(BenchDaemon {
            daemon: daemon.volume(volume).start()?,
            control,
            _dir: dir,
        }))
    }

    /// MMIO doorbells and commands of the I/O queues so far.
    fn counters(&self) -> Result<(u64, u64)> {
        let out = Command::new(program()?)
            .args(["stats", "--control"])
            .arg(&self.control)
            .arg("--json")
            .output()?;
        ensure!(
            out.status.success(),
            "vnvme stats: {}",
            String::from_utf8_lossy(&out.stderr)
        );
        let stats: Value = serde_json::from_slice(&out.stdout).context("vnvme stats")?;
        let queues = stats["controllers"][0]["queues"].as_array();
        let queues = queues.context("vnvme stats has no queues")?;
        let sum = |name: &str| {
            let io = queues.iter().filter(|q| q["qid"].as_u64() != Some(0));
            io.filter_map(|q| q[name].as_u64()).sum::<u64>()
        };
        Ok((sum("mmio_doorbells"), sum("commands")))
    }
}

/// The words that give QEMU a disk of its own on null-co, as in the
/// document; none for one of vnvme's.
fn qemu_disk(disk: &Disk) -> Vec<String> {
    let By::Qemu { dbcs } = disk.by else {
        return Vec::new();
    };
    let id = disk.serial;
    vec![
        "-drive".into(),
        format!(
            "id={id},if=none,format=raw,file.driver=null-co,file.read-zeroes=on,file.size={SIZE}"
        ),
        "-device".into(),
        format!("nvme,serial={id},drive={id},dbcs={dbcs}"),
    ]
}

/// Measures.
pub fn run(options: &BenchOptions, figures: &mut Figures) -> Result<()> {
    measure(options, figures)?;
    count(options, figures)
}

/// IOPS of all disks, and the MMIO doorbells of vnvme's.
fn measure(options: &BenchOptions, figures: &mut Figures) -> Result<()> {
    let mut builder = Guest::builder("bench").cpus(1).firmware(Firmware::Qboot);
    builder = builder.limit(Duration::from_secs(7200));
    let mut disks = Vec::new();
    for disk in &DISKS {
        let served = BenchDaemon::start(disk)?;
        if let Some(one) = &served {
            builder = builder.vfio_user(one.daemon.socket());
        }
        builder = builder.qemu_args(qemu_disk(disk));
        disks.push((disk, served));
    }
    let guest = builder.boot()?;
    for run in 0..options.runs {
        say(format!("bench: guest, run {} of {}", run + 1, options.runs));
        for depth in DEPTHS {
            for (disk, served) in &disks {
                let one = served.as_ref();
                let before = one.map(BenchDaemon::counters).transpose()?;
                let report = fio(&guest, disk, depth, options.runtime)?;
                let mut add =
                    |metric, unit, value| figures.add(disk.case, depth, metric, unit, value);
                add("iops", "1/s", report.iops);
                add("p50_ns", "ns", report.p50_ns);
                add("p99_ns", "ns", report.p99_ns);
                if let (Some(one), Some((mmio, commands))) = (one, before) {
                    let (mmio_now, commands_now) = one.counters()?;
                    let commands = commands_now.saturating_sub(commands).max(1);
                    let mmio = mmio_now.saturating_sub(mmio);
                    add("mmio_per_io", "1", mmio as f64 / commands as f64);
                }
            }
        }
    }
    idle(&disks, figures)?;
    guest.poweroff()?;
    for (_, served) in &disks {
        served
            .as_ref()
            .map_or(Ok(()), |one| one.daemon.terminate())?;
    }
    Ok(())
}

/// CPU time of the daemons while the booted guest leaves its disks alone, per cent of a core.
fn idle(disks: &[(&Disk, Option<BenchDaemon>)], figures: &mut Figures) -> Result<()> {
    say(format!("bench: guest, idle for {IDLE:?}"));
    // Work that fio left behind has completed by then.
    std::thread::sleep(Duration::from_secs(2));
    let served = disks
        .iter()
        .filter_map(|(disk, served)| Some((disk.case, served.as_ref()?)));
    let times = || -> Result<Vec<Duration>> {
        let time = |(_, served): (_, &BenchDaemon)| cpu_time(served.daemon.serving());
        served.clone().map(time).collect()
    };
    let (before, start) = (times()?, Instant::now());
    std::thread::sleep(IDLE);
    let (after, passed) = (times()?, start.elapsed());
    for ((case, _), (before, after)) in served.clone().zip(before.iter().zip(&after)) {
        let used = after.saturating_sub(*before);
        let share = used.as_secs_f64() / passed.as_secs_f64() * 100.0;
        figures.add(case, 1, "idle_cpu", "%", share);
    }
    Ok(())
}

/// CPU time that a process has used, in user and kernel mode: /proc/PID/schedstat of
/// its threads, in nanoseconds.
fn cpu_time(pid: u32) -> Result<Duration> {
    let mut total = 0;
    for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
        let text = fs::read_to_string(thread?.path().join("schedstat"))?;
        let first = text.split_whitespace().next().context("schedstat")?;
        total += first.parse::<u64>().context("schedstat")?;
    }
    Ok(Duration::from_nanos(total))
}

/// Doorbell writes of QEMU's own controller, by its trace events, in guests
/// with one of its disks each.
fn count(options: &BenchOptions, figures: &mut Figures) -> Result<()> {
    say("bench: guest, counting the doorbells of QEMU's controller");
    let cache = Cache::open()?;
    let dir = cache.scratch()?;
    for disk in &DISKS {
        let mut args = qemu_disk(disk);
        if args.is_empty() {
            continue;
        }
        let log = dir.path().join(disk.serial);
        args.push("-trace".into());
        args.push(format!(
            "enable=pci_nvme_mmio_doorbell_*,file={}",
            log.display()
        ));
        let builder = Guest::builder("bench-trace")
            .cpus(1)
            .firmware(Firmware::Qboot);
        let guest = builder.qemu_args(args).boot()?;
        for depth in DEPTHS {
            let before = doorbells(&log)?;
            let ios = fio(&guest, disk, depth, options.runtime.min(2))?.ios;
            let after = doorbells(&log)?;
            let doorbells = after.saturating_sub(before) as f64;
            figures.add(
                disk.case,
                depth,
                "mmio_per_io",
                "1",
                doorbells / ios.max(1) as f64,
            );
        }
        guest.poweroff()?;
    }
    Ok(())
}

/// I/O queues' doorbell events so far.
fn doorbells(log: &Path) -> Result<u64> {
    // Output that the backend has buffered appears within a moment.
    std::thread::sleep(Duration::from_millis(500));
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    // "pci_nvme_mmio_doorbell_sq sqid 1 new_tail 2"; the Admin queue is number 0.
    let lines = text.lines().filter(|l| l.contains("mmio_doorbell_"));
    Ok(lines.filter(|l| !l.contains("qid 0 ")).count() as u64)
}

/// fio on one disk, as the document has it.
fn fio(guest: &Guest, disk: &Disk, depth: u32, runtime: u32) -> Result<JobFigures> {
    let script = format!(
        "for s in /sys/class/nvme/*/serial; do read -r found <$s; [ \"$found\" = {serial} ] && break; found=; done
         [ -n \"$found\" ] || {{ echo 'no disk {serial}'; exit 1; }}
         c=${{s%/serial}}; c=${{c##*/}}
         fio --name=bench --filename=/dev/${{c}}n1 --ioengine=libaio --thread=1 --direct=1 --verify=0 --rw=randread --bs=4k \
         --iodepth={depth} --time_based --ramp_time=0 --runtime={runtime} --output-format=json",
        serial = disk.serial
    );
    let limit = Duration::from_secs(60 + u64::from(runtime) * 4);
    JobFigures::parse(&guest.run_for(limit, &script)?)
}
