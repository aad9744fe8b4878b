//! Records of disks: the file under an attached guest is the one that the guest has, identities are
//! unique and lasting, and the block size stays.

use crate::common::*;
use crate::failure_domains::{Domain, NbdServer, Reading, command, controller, hide, show};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Puts another file in the place of a disk's file, as `mv other.raw disk.raw` does. [`show`]
/// brings the former file back.
fn replace(test_dir: &TestDir, name: &str, new: &str) {
    hide(test_dir, name);
    fs::rename(test_dir.path(new), test_dir.path(name)).unwrap();
}

fn create_qcow2(test_dir: &TestDir, name: &str, more: &[&str]) -> Option<String> {
    let path = text(&test_dir.path(name));
    let create = Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2"])
        .args(more)
        .args([&path, "1M"])
        .status();
    let is_made = create.is_ok_and(|status| status.success());
    if !is_made {
        testkit::skip("vnvme::records::qcow2", "there is no qemu-img");
    }
    is_made.then_some(path)
}

/// A kind of volume with a file that is replaced by another one of the same size.
struct Kind {
    name: &'static str,
    /// Makes the file, the other file, and the URL.
    make: fn(&TestDir) -> Option<String>,
    file: &'static str,
    other: &'static str,
}

const KINDS: [Kind; 3] = [
    Kind {
        name: "a raw file",
        make: |test_dir| {
            test_dir.disk("other.raw", 1 << 20);
            Some(test_dir.disk("bad.raw", 1 << 20))
        },
        file: "bad.raw",
        other: "other.raw",
    },
    Kind {
        name: "an image",
        make: |test_dir| {
            create_qcow2(test_dir, "other.qcow2", &[])?;
            Some(format!(
                "qcow2://{}",
                create_qcow2(test_dir, "bad.qcow2", &[])?
            ))
        },
        file: "bad.qcow2",
        other: "other.qcow2",
    },
    Kind {
        name: "the backing file of an image",
        make: |test_dir| {
            let base = test_dir.disk("base.raw", 1 << 20);
            test_dir.disk("other.raw", 1 << 20);
            let backed = ["-b", &base, "-F", "raw"];
            let image = create_qcow2(test_dir, "bad.qcow2", &backed)?;
            Some(format!("qcow2://{image}?backing={base}"))
        },
        file: "base.raw",
        other: "other.raw",
    },
];

/// Another file at the path of a guest's disk would be another disk's data for the guest.
#[test]
fn file_replaced_under_guest_makes_disk_unavailable_until_accepted_or_back() {
    for kind in KINDS {
        for is_accepted in [false, true] {
            let test_dir = TestDir::new();
            let Some(volume) = (kind.make)(&test_dir) else {
                continue;
            };
            let good = test_dir.disk("good.raw", 1 << 20);
            let disks = controller(&test_dir, "bad", &["mem://1M", &volume], "")
                + &controller(&test_dir, "good", &[&good], "");
            let domain = Domain::start(test_dir, &disks);
            let (mut bad, mut good) = (domain.host("bad"), domain.host("good"));
            bad.write(2, 0, &pattern(1, 4096));
            bad.flush(2);
            good.write(1, 0, &pattern(2, 4096));
            replace(&domain.test_dir, kind.file, kind.other);
            domain.kill();
            let reading = Reading::start(bad, 2);
            // The process after the next one knows it, too.
            for _ in 0..2 {
                let why = domain.error("bad").unwrap_or_default();
                for words in [&volume, "inode ", "there now is", "vnvme accept bad"] {
                    assert!(why.contains(words), "{}: {why}", kind.name);
                }
                assert!(good.read(1, 0, 4096) == pattern(2, 4096), "{}", kind.name);
                assert!(reading.waits());
                domain.kill();
            }
            let (code, said) = command(&domain, &["accept", "good"]);
            assert_eq!(code, Some(1), "{said}");
            assert!(said.contains("\"good\" has the volumes"), "{said}");
            if is_accepted {
                let (code, said) = command(&domain, &["accept", "bad"]);
                assert_eq!(
                    (code, &*said),
                    (Some(0), "bad has its new volumes, and is tried again\n")
                );
            } else {
                show(&domain.test_dir, kind.file)
            }
            let (mut bad, read) = reading.end();
            let is_old = is_accepted && kind.file != "base.raw";
            let expected = if is_old {
                vec![0; 4096]
            } else {
                pattern(1, 4096)
            };
            assert!(read == expected, "{}", kind.name);
            domain.wait_served("bad");
            bad.write(2, 8, &pattern(3, 4096));
            domain.kill();
            assert!(bad.read(2, 8, 4096) == pattern(3, 4096), "{}", kind.name);
            assert_eq!(domain.error("bad"), None);
            drop((bad, good));
            domain.daemon.end();
        }
    }
}

/// An upgrade opens every file anew, too: one that was replaced brings the old version back.
#[test]
fn upgrade_with_replaced_file_names_disk_and_leaves_others_alone() {
    let test_dir = TestDir::new();
    let [good, bad, _] =
        ["good.raw", "bad.raw", "other.raw"].map(|name| test_dir.disk(name, 1 << 20));
    let disks =
        controller(&test_dir, "bad", &[&bad], "") + &controller(&test_dir, "good", &[&good], "");
    let domain = Domain::start(test_dir, &disks);
    let (mut bad, mut good) = (domain.host("bad"), domain.host("good"));
    bad.write(1, 0, &pattern(1, 4096));
    good.write(1, 0, &pattern(2, 4096));
    replace(&domain.test_dir, "bad.raw", "other.raw");
    let (code, said) = command(&domain, &["upgrade"]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("disk bad cannot be served"), "{said}");
    assert!(said.contains("vnvme accept bad"), "{said}");
    assert!(good.read(1, 0, 4096) == pattern(2, 4096));
    show(&domain.test_dir, "bad.raw");
    assert!(bad.read(1, 0, 4096) == pattern(1, 4096));
    drop((bad, good));
    domain.daemon.end();
}

/// A file that was cut at a block boundary opens well, and lacks what its guest has written.
#[test]
fn shorter_file_under_guest_makes_disk_unavailable() {
    let test_dir = TestDir::new();
    let file = test_dir.disk("bad.raw", 1 << 20);
    let disks = controller(&test_dir, "bad", &[&file], "");
    let domain = Domain::start(test_dir, &disks);
    let mut bad = domain.host("bad");
    bad.write(1, 1024, &pattern(1, 4096));
    let cut = fs::File::options().write(true).open(&file).unwrap();
    // What a guest has seen is recorded: the file is longer first.
    cut.set_len(2 << 20).unwrap();
    eventually("its guest sees the new size", || {
        bad.identify_namespace(1).unwrap().nsze.get() == 4096
    });
    domain.kill();
    assert_eq!(domain.error("bad"), None);
    cut.set_len(1 << 19).unwrap();
    domain.kill();
    let why = domain.error("bad").unwrap_or_default();
    assert!(
        why.contains("it has 524288 bytes, and the guest has a disk of 2097152"),
        "{why}"
    );
    cut.set_len(2 << 20).unwrap();
    domain.wait_served("bad");
    drop(bad);
    domain.daemon.end();
}

/// Without a guest, another file is what an operator has put there.
#[test]
fn file_replaced_without_guest_is_served() {
    let test_dir = TestDir::new();
    let [bad, _] = ["bad.raw", "other.raw"].map(|name| test_dir.disk(name, 1 << 20));
    fs::write(test_dir.path("other.raw"), vec![7; 1 << 20]).unwrap();
    let disks = controller(&test_dir, "bad", &[&bad], "");
    let domain = Domain::start(test_dir, &disks);
    let before = identity(&mut domain.host("bad"), 1);
    eventually("its guest has left", || {
        !domain.client.disk("bad").unwrap().attached
    });
    replace(&domain.test_dir, "bad.raw", "other.raw");
    domain.kill();
    assert_eq!(domain.error("bad"), None);
    let mut host = domain.host("bad");
    assert!(host.read(1, 0, 4096) == [7; 4096]);
    // The path is the same, and so is the identity.
    assert_eq!(identity(&mut host, 1), before);
    assert_eq!(
        domain
            .daemon
            .count("no guest is attached, and it is not the file"),
        1
    );
    drop(host);
    domain.daemon.end();
}

/// Serial number, subsystem NQN, NGUID, EUI-64 and UUID.
type Identity = (String, String, [u8; 16], [u8; 8], [u8; 16]);

fn identity(host: &mut Host, nsid: u32) -> Identity {
    let controller = host.identify_controller();
    let namespace = host.identify_namespace(nsid).unwrap();
    let serial = format!("{:?}", controller.sn);
    let subnqn = format!("{:?}", controller.subnqn);
    (
        serial,
        subnqn,
        namespace.nguid,
        namespace.eui64,
        host.uuid(nsid),
    )
}

fn all_differ(a: &Identity, b: &Identity) -> bool {
    a.0 != b.0 && a.1 != b.1 && a.2 != b.2 && a.3 != b.3 && a.4 != b.4
}

/// Two volumes in memory of one size are two disks; each is the same one for its guest when its
/// process was killed.
#[test]
fn disks_in_memory_have_identities_of_their_own_that_survive_a_kill() {
    let test_dir = TestDir::new();
    let disks = controller(&test_dir, "a", &["mem://1M", "mem://1M"], "")
        + &controller(&test_dir, "b", &["mem://1M"], "")
        + &controller(&test_dir, "c", &["null://1M"], "")
        + &controller(&test_dir, "d", &["null://1M"], "");
    let domain = Domain::start(test_dir, &disks);
    let mut hosts = ["a", "b", "c", "d"].map(|name| domain.host(name));
    let before = hosts.each_mut().map(|host| identity(host, 1));
    for (at, one) in before.iter().enumerate() {
        for other in &before[at + 1..] {
            assert!(all_differ(one, other), "{one:?} {other:?}");
        }
        assert_eq!(one.2, one.4, "the UUID is the NGUID");
    }
    assert_ne!(identity(&mut hosts[0], 2).2, before[0].2);
    domain.kill();
    assert_eq!(hosts.each_mut().map(|host| identity(host, 1)), before);
    // Without a guest, too.
    drop(hosts);
    domain.kill();
    let mut hosts = ["a", "b", "c", "d"].map(|name| domain.host(name));
    assert_eq!(hosts.each_mut().map(|host| identity(host, 1)), before);
    drop(hosts);
    domain.daemon.end();
}

/// An export has no identifier of its own: its address stands for it, so that a daemon that takes
/// the place of another one shows the same disk.
#[test]
fn nbd_export_has_one_identity_in_all_daemons_of_a_host() {
    let test_dir = TestDir::new();
    test_dir.disk("bad.raw", 4 << 20);
    let Some(server) = NbdServer::start(&test_dir) else {
        return testkit::skip("vnvme::records::nbd", "there is no qemu-nbd");
    };
    let url = format!("nbd+unix:///?socket={}", text(&test_dir.path("nbd")));
    let seen = ["a", "b"].map(|name| {
        let socket = test_dir.path(&format!("{name}.sock"));
        let daemon = Daemon::spawn(&["serve", "--socket", &text(&socket), &url]);
        daemon.wait_listening(&socket);
        let mut host = Host::up(&socket);
        let seen = identity(&mut host, 1);
        drop(host);
        daemon.end();
        seen
    });
    assert_eq!(seen[0], seen[1]);
    drop(server);
}

/// The size of an export is all that tells it from another one at the same address.
#[test]
fn export_of_another_size_makes_disk_unavailable() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("bad.raw", 4 << 20);
    let Some(server) = NbdServer::start(&test_dir) else {
        return testkit::skip("vnvme::records::nbd", "there is no qemu-nbd");
    };
    let url = format!("nbd+unix:///?socket={}", text(&test_dir.path("nbd")));
    let disks = controller(&test_dir, "a", &[&url], "");
    let domain = Domain::start(test_dir, &disks);
    let mut guest = domain.host("a");
    guest.write(1, 0, &pattern(1, 4096));
    guest.flush(1);
    let resize = |bytes| {
        let file = fs::OpenOptions::new().write(true).open(&disk).unwrap();
        file.set_len(bytes).unwrap();
    };
    let end = |server: NbdServer| {
        drop(server);
        fs::remove_file(domain.test_dir.path("nbd")).unwrap();
    };
    // The process before would take another size for a resize.
    end(server);
    domain.kill();
    resize(8 << 20);
    let server = NbdServer::start(&domain.test_dir).unwrap();
    let words = [
        "export of 4194304 bytes",
        "export of 8388608 bytes",
        "vnvme accept a",
    ];
    let mut why = String::new();
    eventually("the other export is found", || {
        why = domain.error("a").unwrap_or_default();
        words.iter().all(|words| why.contains(words))
    });
    end(server);
    resize(4 << 20);
    let server = NbdServer::start(&domain.test_dir).unwrap();
    assert!(guest.read(1, 0, 4096) == pattern(1, 4096));
    domain.wait_served("a");
    drop(guest);
    domain.daemon.end();
    drop(server);
}

/// The former rule, by which the path or size alone counts.
#[test]
fn identity_by_path_is_the_former_one() {
    let test_dir = TestDir::new();
    let file = test_dir.disk("a.raw", 1 << 20);
    let disks = controller(&test_dir, "a", &["mem://1M"], "")
        + &controller(&test_dir, "b", &["mem://1M"], "")
        + &controller(&test_dir, "c", &[&file], "");
    let domain = Domain::start_with(test_dir, &disks, &["--identity", "path"]);
    let of = |name| identity(&mut domain.host(name), 1);
    let (a, b, by_path) = (of("a"), of("b"), of("c"));
    assert_eq!(a, b);
    assert_eq!(a.4, [0; 16]);
    let Domain {
        test_dir, daemon, ..
    } = domain;
    daemon.end();
    let domain = Domain::start(test_dir, &disks);
    let by_machine = identity(&mut domain.host("c"), 1);
    assert!(all_differ(&by_machine, &by_path));
    domain.daemon.end();
}

/// Names of the files in the folder of the records.
fn records(test_dir: &TestDir) -> Vec<String> {
    let files = fs::read_dir(test_dir.path("state.disks")).unwrap();
    let files = files.map(|file| file.unwrap().file_name().into_string().unwrap());
    let mut files: Vec<String> = files.collect();
    files.sort();
    files
}

/// Beside the state file of a daemon, records outlast the daemon and the machine. A record that is
/// damaged or missing is made anew, and no disk notices.
#[test]
fn records_outlast_daemon_and_their_loss_makes_no_disk_unavailable() {
    let test_dir = TestDir::new();
    let state = text(&test_dir.path("state.toml"));
    let file = test_dir.disk("b.raw", 1 << 20);
    let folder = text(test_dir.path("x").parent().unwrap());
    let disks = format!("[process]\nallow = [\"{folder}\"]\n")
        + &controller(&test_dir, "a", &["mem://1M"], "")
        + &controller(&test_dir, "b", &[&file], "");
    let start = |test_dir| Domain::start_with(test_dir, &disks, &["--state", &state]);
    let domain = start(test_dir);
    let of = |domain: &Domain| ["a", "b"].map(|name| identity(&mut domain.host(name), 1));
    let before = of(&domain);
    assert_eq!(records(&domain.test_dir), ["a.toml", "b.toml"]);
    // The guest of a raw disk writes the signature of an image, and the host is restarted.
    let mut block = vec![0; 4096];
    block[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
    domain.host("b").write(1, 0, &block);
    let Domain {
        test_dir, daemon, ..
    } = domain;
    daemon.end();
    let domain = start(test_dir);
    assert_eq!(of(&domain), before);
    assert_eq!(domain.error("b"), None);
    let socket = format!("socket={}", text(&domain.test_dir.path("c.sock")));
    let (code, said) = command(&domain, &["add", "controller", &socket, "mem://1M"]);
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(records(&domain.test_dir), ["a.toml", "b.toml", "c.toml"]);
    let (code, said) = command(&domain, &["remove", "c"]);
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(records(&domain.test_dir), ["a.toml", "b.toml"]);
    let Domain {
        test_dir, daemon, ..
    } = domain;
    daemon.end();
    fs::write(test_dir.path("b.raw"), vec![0; 1 << 20]).unwrap();
    fs::remove_file(test_dir.path("state.disks/a.toml")).unwrap();
    let record = test_dir.path("state.disks/b.toml");
    let len = fs::metadata(&record).unwrap().len();
    fs::File::options()
        .write(true)
        .open(&record)
        .unwrap()
        .set_len(len / 2)
        .unwrap();
    let domain = start(test_dir);
    assert_eq!(
        domain
            .daemon
            .count("b.toml: this record of a disk is damaged"),
        1
    );
    let after = of(&domain);
    assert!(all_differ(&after[0], &before[0]), "it was random");
    assert_eq!(
        after[1], before[1],
        "it is made from the machine and the path"
    );
    domain.daemon.end();
}

/// A guest that reads one identity from two volumes would merge them into one disk.
#[test]
fn identity_of_another_volume_is_refused() {
    let test_dir = TestDir::new();
    let [a, b, c] = ["a", "b", "c"].map(|name| test_dir.disk(&format!("{name}.raw"), 1 << 20));
    let folder = text(test_dir.path("x").parent().unwrap());
    let disks =
        format!("[process]\nallow = [\"{folder}\"]\n") + &controller(&test_dir, "a", &[&a], "");
    let domain = Domain::start(test_dir, &disks);
    let mut host = domain.host("a");
    let nguid = host.identify_namespace(1).unwrap().nguid;
    let nguid: String = nguid.iter().map(|byte| format!("{byte:02x}")).collect();
    let volume = format!("{b}?nguid={nguid}");
    let socket = format!("socket={}", text(&domain.test_dir.path("b.sock")));
    let (code, said) = command(&domain, &["add", "controller", &socket, &volume]);
    assert_eq!(code, Some(1), "{said}");
    assert!(
        said.contains("namespace 1 has the nguid of namespace 1 of the disk a"),
        "{said}"
    );
    let (code, said) = command(&domain, &["attach", "a", &volume]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("nguid"), "{said}");
    // Identities that a disk brings along.
    let uuid = "0f0e0d0c-0b0a-4908-8706-050403020100";
    let volume = format!("{c}?uuid={uuid}&nguid=000102030405060708090a0b0c0d0e0f");
    let (code, said) = command(&domain, &["attach", "a", &volume]);
    assert_eq!(code, Some(0), "{said}");
    let (_, _, nguid, _, uuid) = identity(&mut host, 2);
    assert_eq!(nguid, std::array::from_fn(|at| at as u8));
    assert_eq!(uuid[..2], [0x0f, 0x0e]);
    domain.kill();
    assert_eq!(identity(&mut host, 2).4, uuid);
    drop(host);
    // At the start, too: only one of the two disks is served.
    let Domain {
        test_dir, daemon, ..
    } = domain;
    daemon.end();
    let volumes = ["a", "b"].map(|name| text(&test_dir.path(&format!("{name}.raw"))));
    let [first, second] =
        ["uuid", "nguid"].map(|key| format!("?{key}=0f0e0d0c0b0a49088706050403020100"));
    let disks = controller(&test_dir, "a", &[&(volumes[0].clone() + &second)], "")
        + &controller(&test_dir, "b", &[&(volumes[1].clone() + &first)], "");
    let domain = Domain::start(test_dir, &disks);
    let why = domain.error("b").unwrap_or_default();
    assert!(
        why.contains("namespace 1 has the uuid of namespace 1 of the disk a"),
        "{why}"
    );
    assert_eq!(domain.error("a"), None);
    domain.daemon.end();
}

/// A mounted file system on a device with blocks of 4096 bytes: direct I/O takes no less.
struct LargeBlocks {
    device: String,
    mount: PathBuf,
}

impl LargeBlocks {
    fn mount(test_dir: &TestDir) -> Option<Self> {
        let skip = |why: &str| testkit::skip("vnvme::records::blocks", why);
        let image = test_dir.disk("blocks.img", 64 << 20);
        let run = |program: &str, args: &[&str]| {
            let output = Command::new(program).args(args).output();
            let output = output.ok().filter(|output| output.status.success())?;
            Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
        };
        let args = ["--find", "--show", "--sector-size", "4096", &image];
        let Some(device) = run("losetup", &args) else {
            skip("losetup: no device");
            return None;
        };
        let mount = test_dir.path("mount");
        fs::create_dir(&mount).unwrap();
        let mut made = Self { device, mount };
        let point = text(&made.mount);
        let is_made = run("mkfs.ext4", &["-q", "-F", "-b", "4096", &made.device]).is_some();
        if !is_made || run("mount", &[&made.device, &point]).is_none() {
            skip("mkfs.ext4 or mount: refused");
            made.mount = PathBuf::new();
            return None;
        }
        Some(made)
    }

    /// A disk of 1 MiB with all its blocks written.
    fn disk(&self, name: &str) -> String {
        let path = self.mount.join(name);
        fs::write(&path, vec![0; 1 << 20]).unwrap();
        fs::File::open(&path).unwrap().sync_all().unwrap();
        text(&path)
    }
}

impl Drop for LargeBlocks {
    fn drop(&mut self) {
        if self.mount != Path::new("") {
            let _ = Command::new("umount").arg(&self.mount).status();
        }
        let _ = Command::new("losetup").args(["-d", &self.device]).status();
    }
}

fn block_size(host: &mut Host) -> u64 {
    let namespace = host.identify_namespace(1).unwrap();
    1 << namespace.lbaf[usize::from(namespace.flbas.index())].lbads
}

/// Direct I/O may need larger blocks than a disk has: the disk keeps its own, and the file is
/// accessed through the page cache.
#[test]
fn file_whose_direct_io_needs_large_blocks_has_small_ones_and_keeps_recorded_ones() {
    let test_dir = TestDir::new();
    let Some(blocks) = LargeBlocks::mount(&test_dir) else {
        return;
    };
    let (small, large) = (blocks.disk("small.raw"), blocks.disk("large.raw"));
    let image = blocks.mount.join("image.qcow2");
    let is_made = Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2", &text(&image), "1M"])
        .status();
    let image = if is_made.is_ok_and(|status| status.success()) {
        format!("qcow2://{}", text(&image))
    } else {
        "mem://1M".to_owned()
    };
    let state = text(&test_dir.path("state.toml"));
    let disks = |test_dir: &TestDir, options: &str| {
        controller(test_dir, "small", &[&small], "")
            + &controller(test_dir, "large", &[&format!("{large}{options}")], "")
            + &controller(test_dir, "image", &[&image], "")
    };
    let configured = disks(&test_dir, "?block-size=4096");
    let domain = Domain::start_with(test_dir, &configured, &["--state", &state]);
    let mut host = domain.host("small");
    assert_eq!(block_size(&mut host), 512);
    assert_eq!(block_size(&mut domain.host("image")), 512);
    // Writes of single blocks leave their neighbours alone, and are durable with FUA or a flush.
    host.write(1, 0, &pattern(1, 4096));
    assert_eq!(
        host.write_with(1, 3, &pattern(2, 512), true),
        nvme::Status::SUCCESS
    );
    host.write(1, 5, &pattern(3, 512));
    host.flush(1);
    let mut expected = pattern(1, 4096);
    expected[3 * 512..4 * 512].copy_from_slice(&pattern(2, 512));
    expected[5 * 512..6 * 512].copy_from_slice(&pattern(3, 512));
    assert!(host.read(1, 0, 4096) == expected);
    domain.kill();
    assert!(host.read(1, 0, 4096) == expected);
    assert_eq!(block_size(&mut domain.host("large")), 4096);
    drop(host);
    let Domain {
        test_dir, daemon, ..
    } = domain;
    daemon.end();
    // The block size is not configured any more, and recorded.
    let configured = disks(&test_dir, "");
    let domain = Domain::start_with(test_dir, &configured, &["--state", &state]);
    assert_eq!(block_size(&mut domain.host("small")), 512);
    assert_eq!(block_size(&mut domain.host("large")), 4096);
    let shown = domain.client.disk("large").unwrap();
    assert_eq!(shown.namespaces[0].block_size, 4096);
    domain.daemon.end();
    drop(blocks);
}

/// A slice that shared a block of direct I/O with another one would have its writes torn by it.
#[test]
fn slice_off_the_blocks_of_direct_io_is_refused() {
    let test_dir = TestDir::new();
    let Some(blocks) = LargeBlocks::mount(&test_dir) else {
        return;
    };
    let disk = blocks.disk("disk.raw");
    let slice = |place: &str| format!("{disk}?block-size=4096&{place}");
    let socket = text(&test_dir.socket());
    for place in [
        "offset=512&length=64K",
        "offset=0&length=512",
        "offset=4608",
    ] {
        let serve = ["serve", "--keeper", "off", "--socket", &socket];
        let output = Command::new(env!("CARGO_BIN_EXE_vnvme"))
            .args(serve)
            .arg(slice(place))
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        let why = "does not begin and end on the volume's blocks of 4096 bytes";
        assert!(
            output.status.code() == Some(1) && said.contains(why),
            "{place}: {said}"
        );
    }
    let daemon = Daemon::serve(&test_dir, &[&slice("offset=4096&length=64K")]);
    let mut host = Host::up(&test_dir.socket());
    assert_eq!(block_size(&mut host), 4096);
    drop(host);
    daemon.end();
    drop(blocks);
}
