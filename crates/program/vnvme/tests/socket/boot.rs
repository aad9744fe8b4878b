//! Boot Partitions, as firmware reads them, and the files that they are made of.

use nvme::regs::{self, BootReadStatus, Bpinfo, Bprsel};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use std::fs;
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};

use crate::common::*;
use crate::keeper::{kill_serving, start};

/// In the host's memory.
const BUFFER: u64 = 4 << 20;

/// Reads so many units of 4 KiB from the beginning.
fn read(host: &mut Host, units: u16) -> BootReadStatus {
    host.write_register(regs::BPMBL, &(RAM_BASE + BUFFER).to_le_bytes());
    let select = Bprsel::new().with_bprsz(units).into_bits();
    host.write_register(regs::BPRSEL, &select.to_le_bytes());
    Bpinfo::from_bits(host.read32(regs::BPINFO)).brs()
}

/// The file's content at the time when the disk was opened is there, also in the next process.
#[test]
fn firmware_reads_boot_partition() {
    let test_dir = TestDir::new();
    let (path, bytes) = (test_dir.path("boot.bin"), pattern(3, 10_000));
    fs::write(&path, &bytes).unwrap();
    let (socket, path) = (text(&test_dir.socket()), text(&path));
    let args = ["serve", "--socket", &socket, "--keeper", "process"];
    let args = [&args[..], &["--boot-partition", &path, "mem://8M"]].concat();
    let daemon = start(&test_dir, &args);
    let mut host = Host::up(&test_dir.socket());
    for life in 0..2 {
        host.ram.write_all_at(&[0xee; 12288], BUFFER).unwrap();
        assert_eq!(read(&mut host, 3), BootReadStatus::SUCCESS, "life {life}");
        let mut got = vec![0; 12288];
        host.ram.read_exact_at(&mut got, BUFFER).unwrap();
        assert!(got[..10_000] == bytes && got[10_000..] == [0; 2288]);
        assert_eq!(read(&mut host, 33), BootReadStatus::ERROR);
        kill_serving(&daemon);
    }
    drop(host);
    drop(daemon.end());
}

/// A file that is no image is refused with an error text, and a pipe does not block.
#[test]
fn invalid_boot_file_is_refused() {
    let test_dir = TestDir::new();
    let refusal = |name: &str| {
        let path = text(&test_dir.path(name));
        let output = Command::new(env!("CARGO_BIN_EXE_vnvme"))
            .args(["serve", "--socket", &text(&test_dir.socket()), "mem://8M"])
            .args(["--boot-partition", &path])
            .stdin(Stdio::null())
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(1));
        let refused = String::from_utf8(output.stderr).unwrap();
        assert!(
            refused.contains(&format!("boot partition {path}")),
            "{refused}"
        );
        refused
    };
    assert!(refusal("missing").contains("No such file"));
    fs::write(test_dir.path("empty"), b"").unwrap();
    assert!(refusal("empty").contains("1 byte to 64 MiB, not 0 bytes"));
    let large = fs::File::create(test_dir.path("large")).unwrap();
    large.set_len((64 << 20) + 1).unwrap();
    assert!(refusal("large").contains("1 byte to 64 MiB"));
    fs::create_dir(test_dir.path("folder")).unwrap();
    assert!(refusal("folder").contains("is not a regular file"));
    mknodat(CWD, test_dir.path("pipe"), FileType::Fifo, Mode::RUSR, 0).unwrap();
    assert!(refusal("pipe").contains("is not a regular file"));
}
