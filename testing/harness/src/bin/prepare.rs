//! Fetches and makes everything that a guest needs, so that a later run needs no network. With
//! `--all` the s390x guest, too; `VNVME_NEEDS_S390X=1` makes its absence an error.
#![allow(clippy::unwrap_used, clippy::expect_used)] // Tests use it: a panic fails them.
#![allow(clippy::indexing_slicing, clippy::panic)]

use harness::image::Image;
use harness::progress::say;
use harness::qemu::Qemu;
use harness::s390x::Mainframe;

fn main() -> anyhow::Result<()> {
    let cache = harness::Cache::open()?;
    let image = Image::get(&cache)?;
    let qemu = Qemu::find(&cache)?;
    let accel = qemu.accel(&cache)?;
    say(format!("kernel: {}", image.kernel.display()));
    say(format!("qemu: {}, {accel:?}", qemu.version));
    if !std::env::args().any(|word| word == "--all") {
        return Ok(());
    }
    match Mainframe::fetch(&cache) {
        Ok(mainframe) => say(format!("s390x: {}", mainframe.version())),
        Err(e) if std::env::var("VNVME_NEEDS_S390X").is_ok_and(|v| v == "1") => return Err(e),
        // The tests of AP queues are skipped with this reason.
        Err(e) => say(format!("s390x: not here: {e:#}")),
    }
    Ok(())
}
