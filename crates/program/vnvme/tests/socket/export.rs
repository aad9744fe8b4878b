//! Exports of disks over NBD, with the clients that exist: `qemu-img`, `qemu-nbd`, libnbd's
//! `nbdinfo` and `nbdcopy`.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Command;
use std::time::Duration;

use crate::common::*;
use crate::failure_domains::{Domain, command, controller};
use control::ClientError;
use control::api::{Export, NewExport};
use fuse_disk::{Fault, RequestKind};
use serde_json::Value;

const SIZE: u64 = 8 << 20;
/// Only a hang takes this long.
const BOUND: Duration = Duration::from_secs(60);

/// Starts a daemon in its sandbox, which may open files and sockets in its folder only.
fn start(test_dir: TestDir, disks: &str) -> Domain {
    let allow = text(test_dir.path("x").parent().unwrap());
    Domain::start_with(test_dir, disks, &["--allow", &allow])
}

fn address(domain: &Domain) -> String {
    format!("unix:{}", domain.test_dir.path("nbd.sock").display())
}

fn uri(domain: &Domain) -> String {
    format!(
        "nbd+unix:///?socket={}",
        domain.test_dir.path("nbd.sock").display()
    )
}

fn export(domain: &Domain, disk: &str, writable: bool) -> Result<Export, ClientError> {
    domain.client.export(&NewExport {
        disk: disk.to_owned(),
        nsid: None,
        nbd: address(domain),
        writable,
    })
}

fn refusal(result: Result<Export, ClientError>) -> (u16, String) {
    match result.unwrap_err() {
        ClientError::Refused {
            status, message, ..
        } => (status, message),
        error => panic!("{error}"),
    }
}

fn run(program: &str, args: &[&str]) -> Option<String> {
    let output = Command::new(program).args(args).output();
    let output = match output {
        Ok(output) => output,
        Err(_) => {
            testkit::skip(&format!("vnvme::export::{program}"), "it is not installed");
            return None;
        }
    };
    assert!(output.status.success(), "{program} {args:?}: {output:?}");
    Some(String::from_utf8(output.stdout).unwrap())
}

/// Returns a disk of [`SIZE`] bytes with data in three places; the rest is a hole.
fn sparse(test_dir: &TestDir, name: &str) -> String {
    let disk = test_dir.disk(name, SIZE);
    let file = fs::OpenOptions::new().write(true).open(&disk).unwrap();
    for (seed, at) in [(1, 0), (2, 2 << 20), (3, SIZE - (64 << 10))] {
        file.write_all_at(&pattern(seed, 64 << 10), at).unwrap();
    }
    disk
}

/// A disk whose guest is attached is copied and described by stock clients, and guests' data that
/// is in memory only, too.
#[test]
fn stock_clients_read_disks_with_guests() {
    let test_dir = TestDir::new();
    let disk = sparse(&test_dir, "a.raw");
    let qcow2 = text(&test_dir.path("q.qcow2"));
    if run("qemu-img", &["create", "-q", "-f", "qcow2", &qcow2, "8M"]).is_none() {
        return;
    }
    let disks = controller(&test_dir, "a", &[&disk], "")
        + &controller(&test_dir, "m", &["mem://8M"], "")
        + &controller(&test_dir, "q", &[&format!("qcow2://{qcow2}")], "");
    let domain = start(test_dir, &disks);
    let uri = uri(&domain);
    for name in ["a", "m", "q"] {
        let mut guest = domain.host(name);
        let data = pattern(9, 256 << 10);
        for block in 0..2 {
            guest.write(1, 9000 + 512 * block, &data[..128 << 10]);
        }
        guest.write(1, 7, &data[..4096]);
        let shown = export(&domain, name, false).unwrap();
        assert_eq!((shown.disk.as_str(), shown.bytes), (name, SIZE));
        assert!(!shown.encrypted && !shown.writable);
        let socket = domain.test_dir.path("nbd.sock");
        let mode = fs::metadata(&socket).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let copy = text(&domain.test_dir.path("copy"));
        let convert = ["convert", "-f", "raw", "-O", "raw", &uri, &copy];
        run("qemu-img", &convert).unwrap();
        let mut whole = Vec::new();
        for lba in (0..SIZE / 512).step_by(256) {
            whole.extend(guest.read(1, lba, 128 << 10));
        }
        assert!(fs::read(&copy).unwrap() == whole, "{name}");
        let named = uri.replace("///", &format!("///{name}"));
        run(
            "qemu-img",
            &["compare", "-f", "raw", "-F", "raw", &named, &copy],
        )
        .unwrap();
        if let Some(listed) = run("qemu-nbd", &["--list", "-k", &text(&socket)]) {
            assert!(listed.contains(&format!("export: '{name}'")), "{listed}");
            assert!(listed.contains("base:allocation"), "{listed}");
        }
        let map = run("qemu-img", &["map", "-f", "raw", "--output=json", &uri]).unwrap();
        let map: Value = serde_json::from_str(&map).unwrap();
        let map = map.as_array().unwrap();
        let zero: u64 = map
            .iter()
            .filter(|extent| extent["zero"] == true)
            .map(|extent| extent["length"].as_u64().unwrap())
            .sum();
        if name == "a" {
            // The file system allocates at most some blocks beside the data.
            assert!(zero > 4 << 20, "{map:?}");
        }
        if let Some(text) = run("nbdinfo", &["--json", &uri]) {
            let info: Value = serde_json::from_str(&text).unwrap();
            let info = &info["exports"][0];
            assert_eq!(info["export-size"], SIZE, "{text}");
            assert_eq!(info["is_read_only"], true, "{text}");
            let sizes = run("nbdinfo", &["--map", &uri]).unwrap();
            assert_eq!(sizes.contains("hole,zero"), name == "a", "{sizes}");
        }
        fs::remove_file(&copy).unwrap();
        if run("nbdcopy", &[&uri, &copy]).is_some() {
            assert!(fs::read(&copy).unwrap() == whole, "{name}");
        }
        // Nothing is written through it.
        let source = domain.test_dir.disk("source", SIZE);
        let convert = ["convert", "-n", "-f", "raw", "-O", "raw", &source, &uri];
        let refused = Command::new("qemu-img").args(convert).output().unwrap();
        assert!(!refused.status.success(), "{refused:?}");
        assert!(guest.read(1, 7, 4096) == data[..4096]);
        let (code, said) = command(&domain, &["unexport", name]);
        assert_eq!(code, Some(0), "{said}");
        assert!(!socket.exists());
        assert!(domain.client.exports().unwrap().is_empty());
    }
}

/// A client whose handshake is over; the server waits for its first request.
fn connected(domain: &Domain) -> UnixStream {
    let mut client = UnixStream::connect(domain.test_dir.path("nbd.sock")).unwrap();
    client.set_read_timeout(Some(BOUND)).unwrap();
    let mut greeting = [0; 18];
    client.read_exact(&mut greeting).unwrap();
    assert!(greeting.starts_with(b"NBDMAGICIHAVEOPT"));
    // NBD_OPT_EXPORT_NAME without a name.
    let option = [&[0, 0, 0, 3][..], b"IHAVEOPT", &[0, 0, 0, 1], &[0; 4]].concat();
    client.write_all(&option).unwrap();
    let mut export = [0; 10];
    client.read_exact(&mut export).unwrap();
    assert_eq!(export[..8], SIZE.to_be_bytes());
    client
}

fn is_disconnected(mut client: UnixStream) -> bool {
    let mut byte = [0];
    match client.read(&mut byte) {
        Ok(read) => read == 0,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

#[test]
fn exports_end_with_their_disk_and_process() {
    let test_dir = TestDir::new();
    let disks = controller(&test_dir, "a", &["mem://8M"], "")
        + &controller(&test_dir, "b", &["mem://8M"], "");
    let domain = start(test_dir, &disks);
    let socket = domain.test_dir.path("nbd.sock");
    export(&domain, "a", false).unwrap();
    let client = connected(&domain);
    assert_eq!(domain.client.exports().unwrap()[0].clients, 1);
    domain.client.remove("a", false).unwrap();
    assert!(is_disconnected(client));
    assert!(!socket.exists());
    export(&domain, "b", false).unwrap();
    let client = connected(&domain);
    domain.kill();
    assert!(is_disconnected(client));
    assert!(domain.client.exports().unwrap().is_empty());
    // The killed process has left its socket.
    export(&domain, "b", false).unwrap();
    let client = connected(&domain);
    let ended = domain.daemon.end();
    assert!(ended.status.success(), "{:?}", ended.log);
    assert!(is_disconnected(client));
    assert!(!socket.exists());
}

/// Neither too many clients nor their garbage keep the guest, or the clients that are there, from
/// anything.
#[test]
fn hostile_clients_disturb_nobody() {
    let test_dir = TestDir::new();
    let disks = controller(&test_dir, "a", &["mem://8M"], "");
    let domain = start(test_dir, &disks);
    let mut guest = domain.host("a");
    export(&domain, "a", false).unwrap();
    let mut first = connected(&domain);
    let silent: Vec<UnixStream> = (0..7).map(|_| connected(&domain)).collect();
    let refused = UnixStream::connect(domain.test_dir.path("nbd.sock")).unwrap();
    refused.set_read_timeout(Some(BOUND)).unwrap();
    assert!(is_disconnected(refused));
    drop(silent);
    eventually("there is room", || {
        domain.client.exports().unwrap()[0].clients == 1
    });
    for seed in 0..40 {
        let mut broken = connected(&domain);
        let _ = broken.write_all(&pattern(seed, 4096));
        assert!(is_disconnected(broken));
        guest.write(1, seed, &pattern(seed, 512));
    }
    // A read of everything whose data nobody receives.
    let request = |client: &mut UnixStream, offset: u64, len: u32| {
        let head = [0x25, 0x60, 0x95, 0x13, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];
        let range = [&offset.to_be_bytes()[..], &len.to_be_bytes()].concat();
        client.write_all(&[&head[..], &range].concat()).unwrap();
    };
    let mut deaf = connected(&domain);
    request(&mut deaf, 0, SIZE as u32);
    request(&mut first, 512, 512);
    let mut reply = [0; 16 + 512];
    first.read_exact(&mut reply).unwrap();
    assert_eq!(reply[..8], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0]);
    assert!(reply[16..] == pattern(1, 512));
    assert!(guest.read(1, 39, 512) == pattern(39, 512));
    domain.client.unexport("a").unwrap();
    drop(deaf);
    assert!(guest.read(1, 39, 512) == pattern(39, 512));
}

/// A disk without a guest is written through its export, and no guest comes between.
#[test]
fn writable_export_restores_a_disk() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("a.raw", SIZE);
    let source = sparse(&test_dir, "source.raw");
    let vhost = text(&test_dir.path("v.sock"));
    let disks = controller(&test_dir, "a", &[&disk], "")
        + &format!("[[vhost-user-blk]]\nsocket = \"{vhost}\"\nvolume = \"mem://8M\"\n");
    let domain = start(test_dir, &disks);
    let guest = domain.host("a");
    let (status, why) = refusal(export(&domain, "a", true));
    assert!(status == 409 && why.contains("attached"), "{why}");
    drop(guest);
    eventually("the guest is gone", || {
        !domain.client.disk("a").unwrap().attached
    });
    let uri = uri(&domain);
    let convert = ["convert", "-n", "-f", "raw", "-O", "raw", &source, &uri];
    let written = fs::read(&source).unwrap();
    for name in ["a", "v"] {
        let shown = export(&domain, name, true).unwrap();
        assert!(shown.writable);
        for change in [
            refusal(export(&domain, name, false)),
            refusal(domain.client.remove(name, true).map(|()| shown)),
        ] {
            let (status, why) = change;
            assert!(status == 409 && why.contains("unexport"), "{why}");
        }
        if run("qemu-img", &convert).is_none() {
            return;
        }
        run(
            "qemu-img",
            &["compare", "-f", "raw", "-F", "raw", &source, &uri],
        )
        .unwrap();
        if name == "a" {
            // A guest that connects meanwhile waits.
            let socket = domain.test_dir.path("a.sock");
            let waiting = std::thread::spawn(move || Host::up(&socket));
            run("qemu-img", &convert).unwrap();
            assert!(!domain.client.disk("a").unwrap().attached);
            domain.client.unexport("a").unwrap();
            let mut guest = waiting.join().unwrap();
            for (lba, data) in (0..).step_by(256).zip(written.chunks(128 << 10)) {
                assert!(guest.read(1, lba, data.len()) == data, "{lba}");
            }
        } else {
            if run("nbdcopy", &[&source, &uri]).is_some() {
                run(
                    "qemu-img",
                    &["compare", "-f", "raw", "-F", "raw", &source, &uri],
                )
                .unwrap();
            }
            domain.client.unexport(name).unwrap();
        }
    }
    assert!(fs::read(&disk).unwrap() == written);
}

/// A volume that does not answer keeps guests away: late writes of the restore would replace data
/// of theirs.
#[test]
fn hanging_restore_keeps_guests_away() {
    let test_dir = TestDir::new();
    let Some(fuse) = breaking(
        "export::hanging_restore_keeps_guests_away",
        &test_dir,
        SIZE as usize,
    ) else {
        return;
    };
    let disks = controller(&test_dir, "a", &[&text(&fuse.path())], "");
    let domain = start(test_dir, &disks);
    export(&domain, "a", true).unwrap();
    let mut client = connected(&domain);
    fuse.fail(RequestKind::Write, 0..4096, 1, Fault::Held);
    let data = pattern(5, 4096);
    // NBD_CMD_WRITE.
    let head = [0x25, 0x60, 0x95, 0x13, 0, 0, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8];
    let range = [&0u64.to_be_bytes()[..], &4096u32.to_be_bytes()].concat();
    client
        .write_all(&[&head, &range[..], &data].concat())
        .unwrap();
    assert!(fuse.wait_held(1, WAIT_TIMEOUT));
    let ended = domain.client.unexport("a").unwrap_err();
    assert!(ended.to_string().contains("accepts no guest"), "{ended}");
    assert!(is_disconnected(client));
    let socket = domain.test_dir.path("a.sock");
    let waiting = std::thread::spawn(move || Host::up(&socket));
    let error = domain.client.remove("a", true).unwrap_err().to_string();
    assert!(error.contains("being restored"), "{error}");
    assert!(!domain.client.disk("a").unwrap().attached);
    fuse.release();
    let mut guest = waiting.join().unwrap();
    assert!(guest.read(1, 0, 4096) == data);
    drop(guest);
    drop(domain);
    drop(fuse);
}

/// The process that gets the volume writes it, and this one's metadata of an image are outdated.
#[test]
fn export_ends_when_volume_is_handed_over() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("a.raw", SIZE);
    let disks = controller(&test_dir, "a", &[&disk], "incoming = true");
    let domain = start(test_dir, &disks);
    let guest = domain.host("a");
    export(&domain, "a", false).unwrap();
    let client = connected(&domain);
    drop(guest);
    eventually("the export has ended", || {
        domain.client.exports().unwrap().is_empty()
    });
    assert!(is_disconnected(client));
    let (status, why) = refusal(export(&domain, "a", true));
    assert!(status == 409 && why.contains("another process"), "{why}");
}

/// Sockets of disks that are not served now, of a service manager, and of the daemon itself.
#[test]
fn export_takes_no_socket_of_disk() {
    let test_dir = TestDir::new();
    let missing = text(&test_dir.path("missing.raw"));
    let disks = controller(&test_dir, "a", &["mem://8M"], "")
        + &controller(&test_dir, "b", &[&missing], "");
    let domain = start(test_dir, &disks);
    assert!(domain.error("b").is_some());
    for (name, owner) in [("b.sock", "\"b\""), ("control", "control socket")] {
        let refused = domain.client.export(&NewExport {
            disk: "a".into(),
            nsid: None,
            nbd: format!("unix:{}", domain.test_dir.path(name).display()),
            writable: false,
        });
        let (status, why) = refusal(refused);
        assert!(status == 409 && why.contains(owner), "{status} {why}");
    }
    domain.test_dir.disk("missing.raw", SIZE);
    domain.wait_served("b");
    domain.host("b");
}

#[test]
fn printed_uri_is_percent_encoded() {
    let test_dir = TestDir::new();
    let disks = controller(&test_dir, "a", &["mem://8M"], "");
    let domain = start(test_dir, &disks);
    let socket = domain.test_dir.path("a b.nbd");
    let address = format!("unix:{}", socket.display());
    let (code, said) = command(&domain, &["export", "a", "--nbd", &address]);
    assert!(code == Some(0) && said.contains("/a%20b.nbd"), "{said}");
    let uri = said.split_whitespace().find(|word| word.contains("://"));
    let Some(info) = run("qemu-img", &["info", "--output=json", uri.unwrap()]) else {
        return;
    };
    let info: Value = serde_json::from_str(&info).unwrap();
    assert_eq!(info["virtual-size"], SIZE);
}

#[test]
fn impossible_exports_are_refused_with_reasons() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("a.raw", SIZE);
    let disks = controller(&test_dir, "a", &[&format!("{disk}?read-only=on")], "")
        + &controller(&test_dir, "b", &["mem://8M"], "");
    let domain = start(test_dir, &disks);
    let at = |disk: &str, nsid, nbd: &str, writable| {
        let export = domain.client.export(&NewExport {
            disk: disk.into(),
            nsid,
            nbd: nbd.into(),
            writable,
        });
        refusal(export)
    };
    let good = address(&domain);
    let busy = format!("unix:{}", domain.test_dir.path("a.sock").display());
    let other = domain.test_dir.path("other.sock");
    let taken = format!("unix:{}", other.display());
    let _other = UnixListener::bind(&other).unwrap();
    for ((status, why), expected, words) in [
        (at("c", None, &good, false), 404, "\"c\""),
        (at("a", Some(2), &good, false), 404, "no namespace 2"),
        (at("a", None, &good, true), 409, "read-only"),
        (at("a", None, "unix:nbd.sock", false), 400, "absolute"),
        (at("a", None, "tcp:127.0.0.1:1", false), 400, "unix:PATH"),
        (
            at("a", None, "unix:/tmp/../nbd", false),
            400,
            "option allow",
        ),
        (at("a", None, &busy, false), 409, "the socket of \"a\""),
        (
            at("a", None, &taken, false),
            409,
            "another server is listening",
        ),
    ] {
        assert!(status == expected && why.contains(words), "{status} {why}");
    }
    assert!(domain.client.unexport("a").is_err());
    // None of them has left anything that is in the way.
    export(&domain, "b", true).unwrap();
    domain.client.unexport("b").unwrap();
    export(&domain, "a", false).unwrap();
    let (code, said) = command(&domain, &["exports"]);
    assert_eq!(code, Some(0));
    assert!(
        said.contains("read-only") && said.contains("nbd.sock"),
        "{said}"
    );
}

/// The commands of the page, as printed, but for the folder of the sockets.
#[test]
fn commands_of_backup_page_copy_and_restore() {
    for program in ["qemu-img", "nbdinfo", "nbdcopy"] {
        if run(program, &["--version"]).is_none() {
            return;
        }
    }
    let test_dir = TestDir::new();
    let disk = sparse(&test_dir, "vm0.disk");
    let before = fs::read(&disk).unwrap();
    let disks = controller(&test_dir, "vm0", &[&disk], "");
    let domain = start(test_dir, &disks);
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../docs/backup.md");
    let blocks = testkit::pages::pieces("docs/backup.md", &fs::read_to_string(page).unwrap());
    let blocks: Vec<_> = blocks.into_iter().filter(|piece| piece.is_block).collect();
    assert_eq!(blocks.len(), 3);
    let folder = text(domain.test_dir.path("x").parent().unwrap());
    let program = domain.test_dir.path("vnvme");
    symlink(env!("CARGO_BIN_EXE_vnvme"), &program).unwrap();
    for (number, block) in blocks.iter().enumerate() {
        if number == 2 {
            let file = fs::OpenOptions::new().write(true).open(&disk).unwrap();
            file.write_all_at(&vec![7; SIZE as usize], 0).unwrap();
        }
        let script = block.script().replace("/run/vnvme", &folder);
        let path = std::env::var("PATH").unwrap();
        let done = Command::new("sh")
            .args(["-e", "-c", &script])
            .current_dir(&folder)
            .env("PATH", format!("{folder}:{path}"))
            .env("VNVME_CONTROL", domain.test_dir.path("control"))
            .output()
            .unwrap();
        assert!(done.status.success(), "{done:?}");
        if number == 1 {
            let raw = fs::read(domain.test_dir.path("vm0.raw")).unwrap();
            assert!(raw == before);
        }
    }
    assert!(fs::read(&disk).unwrap() == before);
}
