//! Boots a guest and runs the scripts named on the command line (or given as `-c TEXT`) in it.
#![allow(clippy::unwrap_used, clippy::expect_used)] // Tests use it: a panic fails them.
#![allow(clippy::indexing_slicing, clippy::panic)]
use std::time::Duration;

fn main() -> anyhow::Result<()> {
    let mut builder = harness::Guest::builder("shell");
    let mut script = String::new();
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "-c" => script = args.next().unwrap_or_default(),
            "--qboot" => builder = builder.firmware(harness::Firmware::Qboot),
            "--socket" => builder = builder.vfio_user(args.next().unwrap_or_default()),
            "--qemu-nvme" => {
                builder = builder.disk(harness::Disk::QemuNvme {
                    files: vec![args.next().unwrap_or_default().into()],
                    block_size: 512,
                    read_only: false,
                });
            }
            other => script = std::fs::read_to_string(other)?,
        }
    }
    let guest = builder.boot()?;
    harness::progress::say(format!("guest: booted in {:.1} s", guest.boot_seconds()));
    let out = guest.sh_for(Duration::from_secs(300), &script)?;
    print!("{}", out.text());
    guest.poweroff()?;
    std::process::exit(out.status);
}
