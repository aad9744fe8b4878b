//! `vnvme daemon`: a configuration that is a folder, read again while it is served.

use crate::common::*;
use crate::storage_faults::Loop;
use rustix::process::Signal;
use std::fs;
use std::path::Path;
use std::process::Command;

/// A folder of fragments.
struct Folder(TestDir);

impl Folder {
    fn new() -> Self {
        let test_dir = TestDir::new();
        fs::create_dir(test_dir.path("etc")).unwrap();
        Self(test_dir)
    }

    fn write(&self, fragment: &str, text: &str) {
        fs::write(self.0.path("etc").join(fragment), text).unwrap();
    }

    fn remove(&self, fragment: &str) {
        fs::remove_file(self.0.path("etc").join(fragment)).unwrap();
    }

    fn controller(&self, name: &str, more: &str) -> String {
        let socket = text(&self.0.path(&format!("{name}.sock")));
        format!("[[controller]]\nsocket = \"{socket}\"\n{more}\n")
    }

    fn start(&self, more: &[&str]) -> Daemon {
        let config = text(&self.0.path("etc"));
        let allow = text(self.0.path("x").parent().unwrap());
        let args = [&["daemon", "--config", &config, "--allow", &allow], more].concat();
        Daemon::spawn(&args)
    }

    fn is_there(&self, name: &str) -> bool {
        self.0.path(&format!("{name}.sock")).exists()
    }

    fn reload(&self, daemon: &Daemon, words: &str) {
        self.reload_after(daemon, words, || ());
    }

    /// Reloads after a change, which the answer to an earlier signal may already include.
    fn reload_after(&self, daemon: &Daemon, words: &str, change: impl FnOnce()) {
        let before = daemon.count(words);
        change();
        daemon.signal(Signal::HUP);
        eventually(words, || daemon.count(words) > before);
    }
}

const MEM: &str = "namespace = [{ volume = \"mem://1M\" }]";

#[test]
fn sighup_reconciles_with_configuration_folder() {
    let folder = Folder::new();
    folder.write("10-process.toml", "[process]\nworkers = 2\n");
    folder.write("20-a.toml", &folder.controller("a", MEM));
    folder.write("ignored.txt", "this is no TOML [");
    folder.write(".hidden.toml", "nor this [");
    let daemon = folder.start(&[]);
    daemon.wait_listening(&folder.0.path("a.sock"));
    let mut host = Host::up(&folder.0.path("a.sock"));
    host.write(1, 0, &pattern(1, 4096));
    // Another disk, on a file; and the first has a further namespace.
    let disk = folder.0.disk("b.raw", 1 << 20);
    let two = format!("namespace = [{{ volume = \"mem://1M\" }}, {{ volume = \"{disk}\" }}]");
    folder.write("20-a.toml", &folder.controller("a", &two));
    folder.write("30-b.toml", &folder.controller("b", MEM));
    folder.reload(&daemon, "the configuration was read again added=");
    assert!(folder.is_there("b"));
    host.write(2, 0, &pattern(2, 4096));
    host.flush(2);
    assert_eq!(folder.0.bytes("b.raw", 0, 4096), pattern(2, 4096));
    assert_eq!(host.read(1, 0, 4096), pattern(1, 4096), "it went on");
    // The configuration is unchanged.
    folder.reload(&daemon, "unchanged=2");
    // The file's namespace is removed, and the second disk.
    folder.write("20-a.toml", &folder.controller("a", MEM));
    folder.remove("30-b.toml");
    folder.reload(&daemon, "removed=\"b\"");
    assert!(!folder.is_there("b"));
    assert!(
        host.identify_namespace(2)
            .is_ok_and(|ns| ns.nsze.get() == 0)
    );
    assert_eq!(host.read(1, 0, 4096), pattern(1, 4096), "it went on");
    // The file is closed, and free.
    fs::remove_file(&disk).unwrap();
    let open = format!("/proc/{}/fd", daemon.pid());
    let links = fs::read_dir(open).unwrap();
    let held = links.filter(|link| {
        let path = fs::read_link(link.as_ref().unwrap().path());
        path.is_ok_and(|path| text(&path).contains("b.raw"))
    });
    assert_eq!(held.count(), 0);
    drop(host);
    assert!(daemon.end().status.success());
}

#[test]
fn inapplicable_reload_is_reported_and_changes_nothing() {
    let folder = Folder::new();
    folder.write("10.toml", "[process]\nworkers = 1\n");
    folder.write("20.toml", &folder.controller("a", MEM));
    let daemon = folder.start(&[]);
    daemon.wait_listening(&folder.0.path("a.sock"));
    let mut host = Host::up(&folder.0.path("a.sock"));
    let serial = format!("serial = \"S\"\n{MEM}");
    let b = folder.controller("b", MEM);
    let missing = "namespace = [{ volume = \"/nowhere/x\" }]";
    let below = folder.controller("c", "namespace = [{ volume = \"c.raw\" }]");
    let c = text(&folder.0.path("c.raw"));
    let socket = text(&folder.0.path("c.sock"));
    for (fragment, words) in [
        // The disk "a" has a client.
        ("", "a client is attached"),
        (&folder.controller("a", &serial), "serial cannot change"),
        ("[[controller]\n", "20.toml: TOML parse error at line 1"),
        (
            &format!(
                "{}{b}",
                folder.controller("a", MEM).replace("a.sock", "b.sock")
            ),
            "two disks are called",
        ),
        (
            &format!(
                "{}{}",
                folder.controller("a", MEM),
                folder.controller("c", missing)
            ),
            &format!("20.toml, line 4, controller {socket}: /nowhere/x: the sandbox keeps"),
        ),
        (
            &format!(
                "{}{b}{}",
                folder.controller("a", MEM),
                below.replace("c.raw", &c)
            ),
            &format!("20.toml, line 9, controller {socket}: "),
        ),
        (
            &format!("{}[process]\nworkers = 3\n", folder.controller("a", MEM)),
            "[process] is already in",
        ),
    ] {
        folder.write("20.toml", fragment);
        folder.reload(&daemon, words);
        assert!(!folder.is_there("b") && !folder.is_there("c"), "{words}");
        assert_eq!(host.read(1, 0, 512), [0; 512], "it goes on: {words}");
    }
    folder.write("20.toml", &folder.controller("a", MEM));
    folder.write("10.toml", "[process]\nworkers = 2\n");
    folder.reload(&daemon, "[process]: workers cannot change");
    drop(host);
    assert!(daemon.end().status.success());
}

/// A replaced file, as editors and `sed -i` make it: another file at the path of the first. In a
/// folder of the program's it is read; elsewhere the log names the remedy.
#[test]
fn replaced_file_is_read_in_configuration_folder_only() {
    for (name, words) in [
        ("vnvme", "added=\"b\""),
        ("etc", "the sandbox lets this process read the file"),
    ] {
        let (test_dir, sockets) = (TestDir::new(), TestDir::new());
        fs::create_dir(test_dir.path(name)).unwrap();
        let config = test_dir.path(name).join("disks.toml");
        let disk = |name: &str| {
            let socket = text(&sockets.path(&format!("{name}.sock")));
            format!("[[controller]]\nsocket = \"{socket}\"\n{MEM}\n")
        };
        fs::write(&config, disk("a")).unwrap();
        // Allowed paths may be read, too.
        let allow = text(sockets.path("x").parent().unwrap());
        let args = ["daemon", "--config", &text(&config), "--allow", &allow];
        let daemon = Daemon::spawn(&args);
        daemon.wait_listening(&sockets.path("a.sock"));
        // In the same file: in any case.
        fs::write(&config, format!("{}# more\n", disk("a"))).unwrap();
        let reload = |words: &str| {
            daemon.signal(Signal::HUP);
            eventually(words, || daemon.count(words) > 0);
        };
        reload("unchanged=1");
        let new = test_dir.path(name).join("new");
        fs::write(&new, disk("a") + &disk("b")).unwrap();
        fs::rename(&new, &config).unwrap();
        reload(words);
        assert_eq!(sockets.path("b.sock").exists(), name == "vnvme");
        assert!(daemon.end().status.success());
    }
}

/// A configuration that is cut off is not taken for one without disks; and signals may come faster
/// than they are answered.
#[test]
fn empty_configuration_removes_nothing() {
    let folder = Folder::new();
    folder.write("a.toml", &folder.controller("a", MEM));
    let daemon = folder.start(&[]);
    daemon.wait_listening(&folder.0.path("a.sock"));
    for fragment in ["", "# nothing\n"] {
        folder.write("a.toml", fragment);
        folder.reload(&daemon, "the configuration is empty");
        assert!(folder.is_there("a"));
    }
    folder.remove("a.toml");
    folder.reload(&daemon, "the configuration is empty");
    fs::create_dir(folder.0.path("etc/folder.toml")).unwrap();
    folder.reload(&daemon, "folder.toml: not a regular file");
    fs::remove_dir(folder.0.path("etc/folder.toml")).unwrap();
    assert!(folder.is_there("a"));
    // A fragment changes while many signals come.
    for turn in 0..200 {
        let half = &folder.controller("b", MEM)[..turn % 50];
        folder.write("b.toml", half);
        daemon.signal(Signal::HUP);
    }
    folder.reload_after(&daemon, "the configuration was read again added=", || {
        folder.write("a.toml", &folder.controller("a", MEM));
        folder.write("b.toml", &folder.controller("b", MEM));
    });
    eventually("it is added", || folder.is_there("b"));
    drop(Host::up(&folder.0.path("a.sock")));
    assert!(daemon.end().status.success());
}

#[test]
fn daemon_starts_without_disks_and_ends() {
    let folder = Folder::new();
    let daemon = folder.start(&["--workers", "2"]);
    daemon.wait_log(|line| line.contains("sandbox: "));
    folder.write("a.toml", &folder.controller("a", MEM));
    folder.reload(&daemon, "added=\"a\"");
    let mut host = Host::up(&folder.0.path("a.sock"));
    host.write(1, 0, &pattern(3, 512));
    drop(host);
    let ended = daemon.end();
    assert!(ended.status.success(), "{ended:?}");
    assert!(!folder.is_there("a"));
}

/// Runs `vnvme check` with a fragment.
fn checked(folder: &Folder, fragment: &str) -> (bool, String) {
    folder.write("c.toml", fragment);
    let output = Command::new(env!("CARGO_BIN_EXE_vnvme"))
        .arg("check")
        .arg(folder.0.path("etc"))
        .output()
        .unwrap();
    let said = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8(said).unwrap())
}

#[test]
fn check_reports_file_line_disk_and_remedy() {
    let folder = Folder::new();
    let fine = "# a comment\n\n[[controller]]\nname = \"root\"\nsocket = \"/run/a.sock\"\n\
                namespace = [{ volume = \"mem://1M\" }]\n";
    let (good, said) = checked(&folder, fine);
    assert!(good, "{said}");
    let line = "c.toml, line 3: controller \"root\" at /run/a.sock: mem://1M";
    assert!(said.contains(line), "{said}");
    for (from, to, words) in [
        (
            "socket =",
            "soket =",
            &[
                "c.toml: TOML parse error at line 5",
                "did you mean `socket`?",
            ][..],
        ),
        (
            "mem://1M",
            "mem://1M?block-size=7",
            &["c.toml, line 6, controller /run/a.sock: ", "512 or 4096"],
        ),
        (
            "mem://1M",
            "mem://1M?nsid=x",
            &["c.toml, line 6, controller /run/a.sock: ", "nsid=x"],
        ),
        (
            "\"root\"",
            "7",
            &["c.toml: TOML parse error at line 4", "7 is not text"],
        ),
        ("]]\n", "]\n", &["c.toml: TOML parse error at line 3"]),
    ] {
        let (good, said) = checked(&folder, &fine.replacen(from, to, 1));
        assert!(!good, "{to}: {said}");
        for words in words {
            assert!(said.contains(words), "{words}: {said}");
        }
    }
    let twice = format!("{fine}{}", fine.replace("/run/a", "/run/b"));
    let (good, said) = checked(&folder, &twice);
    assert!(
        !good && said.contains("c.toml, line 10, controller /run/b.sock: "),
        "{said}"
    );
    assert!(said.contains("write name ="), "{said}");
}

/// Mistakes that only the files of this host show, and the words of their messages.
#[test]
fn check_finds_volumes_that_daemon_would_refuse() {
    let folder = Folder::new();
    let path = |name: &str| text(&folder.0.path(name));
    let disk = folder.0.disk("disk.raw", 1 << 20);
    folder.0.disk("empty.raw", 0);
    let fine = |socket: &str, volume: &str| {
        format!(
            "[[controller]]\nsocket = \"{}\"\nnamespace = [{{ volume = \"{volume}\" }}]\n",
            path(socket)
        )
    };
    let (good, said) = checked(&folder, &fine("a.sock", &disk));
    assert!(good, "{said}");
    for (fragment, words) in [
        (
            fine("a.sock", &path("none.raw")),
            "c.toml, line 3, controller ",
        ),
        (fine("a.sock", &path("none.raw")), "none.raw: no such file"),
        (fine("a.sock", &path("empty.raw")), "empty.raw: is empty"),
        (fine("a.sock", &path("etc")), "etc: is a directory"),
        (fine("none/a.sock", &disk), "none does not exist; make it"),
        (
            fine("a.sock", &disk) + &fine("b.sock", &disk),
            "c.toml, line 6, controller ",
        ),
        (fine("a.sock", &disk) + &fine("b.sock", &disk), "overlaps"),
        (
            fine("a.sock", &disk).replacen("namespace", "socket-group = \"nobodys\"\nnamespace", 1),
            "there is no group \"nobodys\"",
        ),
        (
            fine("a.sock", &disk).replacen("namespace", "boot-partition = \"/none\"\nnamespace", 1),
            "boot partition /none",
        ),
    ] {
        let (good, said) = checked(&folder, &fragment);
        assert!(!good && said.contains(words), "{words}: {said}");
        let output = Command::new(env!("CARGO_BIN_EXE_vnvme"))
            .args(["check", "--offline"])
            .arg(folder.0.path("etc"))
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
    }
    // Each of several mistakes has a line.
    let two = fine("a.sock", &path("none.raw")) + &fine("b.sock", &path("empty.raw"));
    let (good, said) = checked(&folder, &two);
    assert!(
        !good && said.contains("no such file") && said.contains("is empty"),
        "{said}"
    );
    // A volume that a daemon serves is no mistake of its configuration.
    folder.write("c.toml", &fine("a.sock", &disk));
    let config = text(&folder.0.path("etc"));
    let daemon = Daemon::spawn(&["daemon", "--config", &config, "--control", "none"]);
    daemon.wait_listening(&folder.0.path("a.sock"));
    let (good, said) = checked(&folder, &fine("a.sock", &disk));
    assert!(good, "{said}");
    daemon.end();
}

/// The system lets one process open a block device exclusively. That process may be the daemon.
#[test]
fn check_warns_of_block_device_that_daemon_serves() {
    let folder = Folder::new();
    let disk = folder.0.disk("disk.raw", 1 << 20);
    let Some(device) = Loop::new(Path::new(&disk)) else {
        return;
    };
    let volume = format!("namespace = [{{ volume = \"{}\" }}]", text(&device.0));
    let fragment = folder.controller("a", &volume);
    let (good, said) = checked(&folder, &fragment);
    assert!(good && !said.contains("the daemon needs it"), "{said}");
    let daemon = folder.start(&["--control", "none"]);
    daemon.wait_listening(&folder.0.path("a.sock"));
    let (good, said) = checked(&folder, &fragment);
    assert!(
        good && said.contains("WARN") && said.contains("the daemon needs it unless"),
        "{said}"
    );
    daemon.end();
    drop(device);
}

#[test]
fn folder_is_applied_like_its_fragments() {
    let folder = Folder::new();
    let control = text(&folder.0.path("control"));
    let allow = text(folder.0.path("x").parent().unwrap());
    let daemon = Daemon::spawn(&["daemon", "--control", &control, "--allow", &allow]);
    for name in ["a", "b"] {
        let socket = text(&folder.0.path(&format!("{name}.sock")));
        let fragment = format!(
            "[[controller]]\nsocket = \"{socket}\"\nnamespace = [{{ volume = \"mem://1M\" }}]\n"
        );
        folder.write(&format!("{name}.toml"), &fragment);
    }
    let apply = || {
        let output = Command::new(env!("CARGO_BIN_EXE_vnvme"))
            .args(["apply", "--control", &control])
            .arg(folder.0.path("etc"))
            .output()
            .unwrap();
        let said = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8(said).unwrap())
    };
    let mut last = (false, String::new());
    eventually("the daemon answers", || {
        last = apply();
        last.0
    });
    assert!(last.1.contains("added: a\nadded: b\n"), "{last:?}");
    let (good, said) = apply();
    assert!(good && said.contains("nothing to do"), "{said}");
    daemon.end();
}
