//! Suite `driver`: one device in one guest, driven by the kernel with libaio and with io_uring, and by us through VFIO.
//!
//! The device is QEMU's own controller on null-co, behind an emulated IOMMU. fio loads it by the kernel's driver, as in the
//! document of QEMU's `nvme://` (4 KiB, direct); then it is handed to vfio-pci, `vnvme bench` loads it in the same way, and
//! the kernel gets it back for the next run.

use std::time::Duration;

use anyhow::{Context, Result};
use harness::image::Image;
use harness::progress::say;
use harness::{Cache, Guest};

use crate::Options;
use crate::figures::Figures;
use crate::report::Report;

const LOADS: [&str; 3] = ["randread", "randwrite", "randrw"];
const DEPTHS: [u32; 2] = [1, 4];
const SERIAL: &str = "bench";
const VNVME: &str = "/tmp/vnvme";

/// Finds the device by its serial number once, while the kernel's driver has it.
const FIND: &str = "for c in /sys/class/nvme/nvme*; do read -r found <$c/serial; [ \"$found\" = bench ] && break; found=; done
    [ -n \"$found\" ] && basename $(readlink $c/device)";

/// Measures.
pub fn run(options: &Options, figures: &mut Figures) -> Result<()> {
    let guest = boot()?;
    let bdf = guest.run(FIND)?.trim().to_owned();
    let vnvme = |args: &str| format!("export LD_LIBRARY_PATH=/tools/lib:/tmp; {VNVME} {args}");
    for run in 0..options.runs {
        say(format!(
            "bench: driver, run {} of {}",
            run + 1,
            options.runs
        ));
        for engine in ["libaio", "io_uring"] {
            each(options, figures, &guest, engine, |load, depth| {
                format!(
                    "d=; for try in $(seq 100); do for n in /sys/bus/pci/devices/{bdf}/nvme/nvme*/nvme*n1; do
                     d=/dev/$(basename $n | sed 's/c[0-9]*n/n/'); [ -b $d ] && break 2; done; sleep 0.1; done
                     fio --name=bench --filename=$d --ioengine={engine} --thread=1 --direct=1 --rw={load} --bs=4k \
                     --iodepth={depth} --time_based --ramp_time=1 --runtime={} --output-format=json",
                    options.runtime
                )
            })?;
        }
        guest.run(&vnvme(&format!("bind {bdf}")))?;
        each(options, figures, &guest, "vnvme", |load, depth| {
            vnvme(&format!(
                "bench nvme://{bdf}/1 --rw={load} --bs=4k --iodepth={depth} --ramp=1 --runtime={} --json 2>/tmp/log || \
                 {{ cat /tmp/log; exit 1; }}",
                options.runtime
            ))
        })?;
        guest.run(&vnvme(&format!("unbind {bdf}")))?;
    }
    guest.poweroff()
}

/// A guest with the device and the program.
fn boot() -> Result<Guest> {
    let builder = Guest::builder("bench-driver").cpus(1).viommu();
    let builder = builder.limit(Duration::from_secs(7200)).qemu_args([
        "-drive",
        "id=bench,if=none,format=raw,file.driver=null-co,file.read-zeroes=on,file.size=64G",
        "-device",
        &format!("nvme,serial={SERIAL},drive=bench"),
    ]);
    let guest = builder.boot()?;
    let program = harness::daemon::program()?;
    let bytes = std::fs::read(&program).with_context(|| format!("{}", program.display()))?;
    guest.push_file(VNVME, 0o755, &bytes)?;
    let libraries = Image::get(&Cache::open()?)?.tree.libraries_of(&program)?;
    let gcc = libraries
        .get("libgcc_s.so.1")
        .context("no libgcc for the guest")?;
    guest.push_file("/tmp/libgcc_s.so.1", 0o755, &std::fs::read(gcc)?)?;
    Ok(guest)
}

/// One way to drive the device, all loads and depths.
fn each(
    options: &Options,
    figures: &mut Figures,
    guest: &Guest,
    way: &str,
    script: impl Fn(&str, u32) -> String,
) -> Result<()> {
    let limit = Duration::from_secs(60 + u64::from(options.runtime) * 4);
    for load in LOADS {
        for depth in DEPTHS {
            let report = Report::parse(&guest.run_for(limit, &script(load, depth))?)?;
            let case = format!("{load} {way}");
            figures.add(&case, depth, "iops", "1/s", report.iops);
            figures.add(&case, depth, "p50_ns", "ns", report.p50_ns);
            figures.add(&case, depth, "p99_ns", "ns", report.p99_ns);
        }
    }
    Ok(())
}
