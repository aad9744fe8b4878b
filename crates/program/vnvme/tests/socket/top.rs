//! `vnvme top` in a terminal: its screen, and the state of the terminal afterwards.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus};
use std::sync::{Arc, Mutex};

use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};

use crate::common::*;
use crate::instances::instance;

const ENTER: &str = "\x1b[?1049h\x1b[?25l";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";

/// A terminal with `vnvme top` in it.
struct Screen {
    terminal: OwnedFd,
    /// Open, as the shell would have it: the terminal stays.
    shell: OwnedFd,
    child: Child,
    shown: Arc<Mutex<String>>,
}

impl Screen {
    fn open(control: &str, columns: u16, lines: u16) -> Self {
        Self::open_with(&[], control, columns, lines)
    }

    fn open_with(more: &[&str], control: &str, columns: u16, lines: u16) -> Self {
        let terminal = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&terminal).unwrap();
        unlockpt(&terminal).unwrap();
        let name = ptsname(&terminal, Vec::new()).unwrap();
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let shell = rustix::fs::open(name, flags, Mode::empty()).unwrap();
        let size = Winsize {
            ws_row: lines,
            ws_col: columns,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        tcsetwinsize(&terminal, size).unwrap();
        let end = || File::from(shell.try_clone().unwrap());
        let child = Command::new(env!("CARGO_BIN_EXE_vnvme"))
            .args(["top", "--control", control, "--interval", "100ms"])
            .args(more)
            .stdin(end())
            .stdout(end())
            .stderr(end())
            .spawn()
            .unwrap();
        let shown = Arc::new(Mutex::new(String::new()));
        let (into, mut from) = (shown.clone(), File::from(terminal.try_clone().unwrap()));
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(read @ 1..) = from.read(&mut bytes) {
                let text = String::from_utf8_lossy(&bytes[..read]).into_owned();
                into.lock().unwrap().push_str(&text);
            }
        });
        Screen {
            terminal,
            shell,
            child,
            shown,
        }
    }

    fn all(&self) -> String {
        self.shown.lock().unwrap().clone()
    }

    /// Returns the last whole screen, without cursor positions.
    fn last(&self) -> String {
        let all = self.all();
        let whole = all.rfind("\x1b[J").map_or("", |end| &all[..end]);
        let last = whole.rsplit("\x1b[H").next().unwrap_or_default();
        let mut plain = last.replace("\r\n", "\n");
        for code in ["\x1b[K", "\x1b[7m", "\x1b[0m"] {
            plain = plain.replace(code, "");
        }
        plain
    }

    /// Waits for a screen; answers it.
    fn wait(&self, what: &str, holds: impl Fn(&str) -> bool) -> String {
        let mut last = String::new();
        eventually(what, || {
            last = self.last();
            holds(&last)
        });
        last
    }

    fn press(&self, keys: &str) {
        let mut terminal = File::from(self.terminal.try_clone().unwrap());
        terminal.write_all(keys.as_bytes()).unwrap();
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id().cast_signed()).unwrap();
        kill_process(pid, signal).unwrap();
    }

    /// Lines are read as a whole, and shown while they are typed.
    fn is_cooked(&self) -> bool {
        let modes = tcgetattr(&self.shell).unwrap().local_modes;
        modes.contains(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG)
    }

    /// Returns whether the process is stopped by a signal.
    fn is_stopped(&self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        stat.contains(") T ")
    }

    fn wait_end(&mut self) -> ExitStatus {
        let mut ended = None;
        eventually("the end of top", || {
            ended = self.child.try_wait().unwrap();
            ended.is_some()
        });
        ended.unwrap()
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn top_screen_follows_keys_and_load() {
    let test_dir = TestDir::new();
    let control = text(&test_dir.path("control.sock"));
    let config = test_dir.path("c.toml");
    let disk = |name: &str| {
        let socket = text(&test_dir.path(&format!("{name}.sock")));
        format!(
            "[[controller]]\nsocket = \"{socket}\"\nnamespace = [{{ volume = \"mem://4M\" }}]\n"
        )
    };
    std::fs::write(&config, ["vm", "web", "db"].map(disk).concat()).unwrap();
    let daemon = Daemon::spawn(&["serve", "--config", &text(&config), "--control", &control]);
    daemon.wait_listening(&test_dir.socket());
    let mut host = Host::up(&test_dir.socket());
    let mut screen = Screen::open(&control, 80, 24);

    // The busy one is the first, and its times are known although few of its commands are timed.
    let line = |shown: &str| shown.lines().nth(4).unwrap_or_default().to_owned();
    let shown = {
        let mut last = String::new();
        eventually("a disk with times", || {
            host.read(1, 0, 4096);
            last = screen.last();
            line(&last).starts_with("vm ") && line(&last).contains('*')
        });
        last
    };
    assert!(shown.starts_with("3 disks "), "{shown}");
    assert!(shown.contains("* of a longer time"), "{shown}");
    assert!(shown.lines().last().unwrap().contains("q quit"), "{shown}");
    assert!(shown.lines().count() <= 24, "{shown}");
    assert!(shown.lines().all(|l| l.chars().count() <= 80), "{shown}");

    screen.press("ssss");
    let shown = screen.wait("sorted by name", |s| s.contains("sorted by name"));
    let names = shown.lines().skip(4).take(3);
    let names: Vec<&str> = names.map(|l| l.split(' ').next().unwrap()).collect();
    assert_eq!(names, ["db", "vm", "web"]);

    screen.press("/we");
    screen.wait("a filter", |s| s.contains("filter: we_"));
    screen.press("\r");
    let shown = screen.wait("the filter's disks", |s| !s.contains("filter: we_"));
    assert!(shown.contains("web ") && !shown.contains("db "), "{shown}");

    screen.press("\x1b");
    screen.wait("all disks", |s| s.contains("\ndb ") && s.contains("\nvm "));
    // Down once: the first; down again: the second, which is vm.
    screen.press("\x1b[B");
    screen.press("j");
    screen.press("\r");
    let shown = screen.wait("a disk's queues", |s| s.contains("QUEUE WORKER"));
    let socket = text(&test_dir.socket());
    assert!(
        shown.contains(&format!("vm   controller {socket}   attached")),
        "{shown}"
    );
    assert!(shown.contains("namespace 1   mem://4M"), "{shown}");

    // A wider window.
    let size = Winsize {
        ws_row: 50,
        ws_col: 160,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    screen.press("\x1b");
    tcsetwinsize(&screen.terminal, size).unwrap();
    screen.wait("all disks again", |s| s.contains("\nweb "));

    screen.press("q");
    assert!(screen.wait_end().success());
    drop(host);
    daemon.end();
}

#[test]
fn top_restores_terminal_for_every_end() {
    let test_dir = TestDir::new();
    let control = text(&test_dir.path("control.sock"));
    let daemon = Daemon::serve(&test_dir, &["--control", &control, "mem://4M"]);
    let ends = |how: &str, end: &dyn Fn(&Screen)| {
        let mut screen = Screen::open(&control, 80, 24);
        screen.wait("disks", |shown| shown.contains("DISK "));
        assert!(!screen.is_cooked(), "{how}: the keys come at once");
        assert!(screen.all().starts_with(ENTER), "{how}");
        end(&screen);
        let status = screen.wait_end();
        assert!(screen.is_cooked(), "{how}");
        eventually(how, || screen.all().contains(LEAVE));
        (status, screen.all())
    };
    for key in ["q", "\x03"] {
        let (status, all) = ends("a key", &|screen| screen.press(key));
        assert!(status.success() && all.ends_with(LEAVE), "{status} {all:?}");
    }
    for signal in [Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT] {
        let (status, all) = ends("a signal", &|screen| screen.signal(signal));
        assert_eq!(status.signal(), Some(signal.as_raw()));
        assert!(all.ends_with(LEAVE), "{signal:?}: {all:?}");
    }

    // Stopped by a shell, and continued.
    let mut screen = Screen::open(&control, 80, 24);
    screen.wait("disks", |shown| shown.contains("DISK "));
    screen.signal(Signal::TSTP);
    eventually("the shell's terminal", || screen.is_cooked());
    eventually("the shell's screen", || screen.all().ends_with(LEAVE));
    // A SIGCONT that is sent before would have no effect.
    eventually("it is stopped", || screen.is_stopped());
    screen.signal(Signal::CONT);
    eventually("its own again", || !screen.is_cooked());
    eventually("a new screen", || {
        let all = screen.all();
        let again = all.rsplit(LEAVE).next().unwrap_or_default();
        again.starts_with(ENTER) && again.contains("DISK ")
    });
    // The daemon's end is printed on the screen that stays.
    daemon.end();
    let status = screen.wait_end();
    assert_eq!(status.code(), Some(1));
    assert!(screen.is_cooked());
    eventually("a message", || {
        let all = screen.all();
        let told = all.rsplit(LEAVE).next().unwrap_or_default();
        told.contains("vnvme: ") && told.contains("control.sock")
    });
}

/// An instance that does not answer delays neither the screen nor the others.
#[test]
fn top_of_all_instances_shows_others_beside_frozen_one() {
    let run = TestDir::new();
    let [first, frozen] = ["vm0", "vm1"].map(|name| instance(&run, name));
    frozen.signal(Signal::STOP);
    let mut screen = Screen::open_with(&["--all"], &text(&run.path("")), 80, 24);
    screen.wait("the instance that answers", |s| {
        s.contains("\nvnvme@vm0/disk ")
    });
    let shown = screen.wait("the instance that does not", |s| {
        s.contains("\nvnvme@vm1 does not answer: ")
    });
    assert!(shown.starts_with("1 disk "), "{shown}");
    assert!(shown.contains("\nvnvme@vm0/disk "), "{shown}");
    frozen.signal(Signal::CONT);
    screen.wait("both instances", |s| {
        s.starts_with("2 disks ") && s.contains("\nvnvme@vm1/disk ")
    });
    // An instance that ends is shown no more, and one that starts is shown.
    frozen.end();
    screen.wait("one instance", |s| s.starts_with("1 disk "));
    let third = instance(&run, "vm2");
    screen.wait("a new instance", |s| s.contains("\nvnvme@vm2/disk "));
    screen.press("q");
    assert!(screen.wait_end().success());
    first.end();
    third.end();
}
