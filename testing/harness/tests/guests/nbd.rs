//! Disks on real NBD servers, Debian's nbdkit and qemu-nbd: under load with verification while the
//! server is killed and started again, with its filters for delays and errors, with an image; and
//! in a guest. The daemons are in their sandbox.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use crate::common::nbd::{LIMIT, ListenAddress, NBDKIT, QEMU, nbdkit, port, qemu_nbd, tree};
use crate::common::{Disks, run_for};
use anyhow::{Context, Result, bail, ensure};
use harness::daemon::program;
use harness::progress::skip;
use harness::served::Controller;
use harness::tree::Tree;
use harness::{Daemon, Guest};

/// Random reads and writes, verified, of a daemon's disk.
fn load(daemon: &Daemon, seconds: u64) -> Result<std::process::Child> {
    load_of(daemon.socket(), seconds)
}

/// The same of the disk behind a socket.
fn load_of(socket: &Path, seconds: u64) -> Result<std::process::Child> {
    let target = format!("vfio-user://{}", socket.display());
    let child = Command::new(program()?)
        .args([
            "bench",
            &target,
            "--rw",
            "randrw",
            "--bs",
            "4k",
            "--iodepth",
            "32",
        ])
        .args(["--size", "32m", "--verify", "--destroy-data"])
        .args(["--runtime", &seconds.to_string()])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()?;
    Ok(child)
}

fn verified(output: &Output, daemon: &Daemon) -> Result<()> {
    if !output.status.success() {
        bail!(
            "{}\n{}\n{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr),
            daemon.log()?
        );
    }
    Ok(())
}

/// Kills and starts the server again and again, for as long as there is load.
fn killed_under_load(tree: &Tree, address: &ListenAddress, disk: &Path) -> Result<()> {
    let file = disk.display().to_string();
    let words = ["plugin:file", &file];
    let mut server = nbdkit(tree, address, &words)?;
    let daemon = Daemon::builder("nbd").volume(address.url()).start()?;
    let mut load = load(&daemon, 6)?;
    let mut kills = 0;
    while load.try_wait()?.is_none() {
        // So long it works, however long the machine takes for all the rest.
        std::thread::sleep(Duration::from_millis(700));
        server.kill()?;
        kills += 1;
        server = nbdkit(tree, address, &words)?;
        wait_connected(&daemon, kills)?;
    }
    verified(&load.wait_with_output()?, &daemon)?;
    let log = daemon.log()?;
    ensure!(log.contains("sandbox: landlock"), "no sandbox:\n{log}");
    daemon.terminate()?;
    drop(server);
    Ok(())
}

/// Waits until the daemon has connected again so many times; it logs the first ten.
fn wait_connected(daemon: &Daemon, times: usize) -> Result<()> {
    let began = Instant::now();
    while daemon.log()?.matches("connected after").count() < times.min(10) {
        ensure!(began.elapsed() < LIMIT, "{times} times:\n{}", daemon.log()?);
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

#[test]
fn nbdkit_killed_under_load_loses_nothing() -> Result<()> {
    let Some(tree) = tree(&NBDKIT) else {
        return Ok(());
    };
    let disks = Disks::new()?;
    let disk = disks.sparse("disk.raw", 64)?;
    let unix = ListenAddress::Unix(disks.dir().join("nbd.sock"));
    killed_under_load(&tree, &unix, &disk)?;
    killed_under_load(&tree, &ListenAddress::Tcp(port()?), &disk)
}

#[test]
fn delays_and_errors_of_nbdkit_filters_reach_guest() -> Result<()> {
    let Some(tree) = tree(&NBDKIT) else {
        return Ok(());
    };
    let disks = Disks::new()?;
    let disk = disks.sparse("disk.raw", 64)?;
    let address = ListenAddress::Unix(disks.dir().join("nbd.sock"));
    let switch = disks.dir().join("errors");
    let (file, error_file) = (disk.display().to_string(), switch.display());
    let error_file = format!("error-file={error_file}");
    let words = [
        "filter:delay",
        "filter:error",
        "plugin:file",
        &file,
        "rdelay=2ms",
        "wdelay=2ms",
        "error=EIO",
        "error-rate=10%",
        &error_file,
    ];
    let _server = nbdkit(&tree, &address, &words)?;
    let daemon = Daemon::builder("nbd-filters")
        .volume(address.url())
        .start()?;
    verified(&load(&daemon, 2)?.wait_with_output()?, &daemon)?;
    fs::write(&switch, "")?;
    let output = load(&daemon, 2)?.wait_with_output()?;
    ensure!(
        !output.status.success(),
        "errors of the server are not seen"
    );
    fs::remove_file(&switch)?;
    verified(&load(&daemon, 1)?.wait_with_output()?, &daemon)?;
    // They were of requests, and not of the connection.
    ensure!(
        !daemon.log()?.contains("connecting again"),
        "{}",
        daemon.log()?
    );
    daemon.terminate()
}

/// Memory behind each form of the protocol that nbdkit can be told to speak.
#[test]
fn every_kind_of_nbd_server_works() -> Result<()> {
    let Some(tree) = tree(&NBDKIT) else {
        return Ok(());
    };
    let disks = Disks::new()?;
    let address = ListenAddress::Unix(disks.dir().join("nbd.sock"));
    let memory = ["plugin:memory", "64M"];
    let sizes = [
        "filter:blocksize-policy",
        "plugin:memory",
        "64M",
        "blocksize-minimum=4096",
        "blocksize-preferred=64K",
        "blocksize-maximum=256K",
        "blocksize-error-policy=error",
    ];
    let without = |what: &'static str| [&[what][..], &memory].concat();
    for (words, options, said) in [
        (
            memory.to_vec(),
            "",
            "(structured replies, several connections)",
        ),
        (
            without("--no-sr"),
            "&connections=3",
            "(simple replies, several connections)",
        ),
        // Without FUA, trim, write-zeroes and flush; and what is written instead.
        (
            [&["filter:fua", "filter:nozero"][..], &memory].concat(),
            "",
            "(",
        ),
        (
            [
                &["filter:multi-conn"][..],
                &memory,
                &["multi-conn-mode=disable"],
            ]
            .concat(),
            "",
            "one connection)",
        ),
        (sizes.to_vec(), "&block-size=4096", "("),
    ] {
        let server = nbdkit(&tree, &address, &words)?;
        let daemon = Daemon::builder("nbd-kinds")
            .volume(format!("{}{options}", address.url()))
            .start()?;
        verified(&load(&daemon, 1)?.wait_with_output()?, &daemon)
            .with_context(|| format!("{words:?}"))?;
        let log = daemon.log()?;
        ensure!(log.contains(said), "{words:?}: no \"{said}\" in\n{log}");
        ensure!(!log.contains("connecting again"), "{words:?}:\n{log}");
        daemon.terminate()?;
        drop(server);
    }
    // What cannot be spoken to, or gives no export, is named.
    for (words, options, said) in [
        (without("--mask-handshake=0"), "", "unfixed handshake"),
        (without("--oldstyle"), "", "oldstyle"),
        (memory.to_vec(), "&connections=17", "from 1 to 16"),
        (
            [
                &["filter:exportname"][..],
                &memory,
                &["exportname-strict=true", "exportname=a"],
            ]
            .concat(),
            "",
            "no export \"\"",
        ),
    ] {
        let _server = nbdkit(&tree, &address, &words)?;
        let (status, log) = Daemon::builder("nbd-refused")
            .volume(format!("{}{options}", address.url()))
            .refuse()?;
        ensure!(!status.success(), "{words:?}: {log}");
        ensure!(log.contains(said), "{words:?}: no \"{said}\" in\n{log}");
    }
    // What may only be read.
    let _server = nbdkit(&tree, &address, &without("--readonly"))?;
    let daemon = Daemon::builder("nbd-read-only")
        .volume(address.url())
        .start()?;
    let output = load(&daemon, 1)?.wait_with_output()?;
    ensure!(!output.status.success(), "a read-only export was written");
    let target = format!("vfio-user://{}", daemon.socket().display());
    let reads = Command::new(program()?)
        .args(["bench", &target, "--rw", "randread", "--runtime", "1"])
        .output()?;
    verified(&reads, &daemon)?;
    daemon.terminate()
}

/// The disk of a server that hangs waits, then fails, and is there again; a disk beside it on the
/// same worker does its work; the statistics show it.
#[test]
fn hanging_nbd_server_is_reported_and_affects_no_other() -> Result<()> {
    let Some(tree) = tree(&NBDKIT) else {
        return Ok(());
    };
    let disks = Disks::new()?;
    let address = ListenAddress::Unix(disks.dir().join("nbd.sock"));
    let server = nbdkit(&tree, &address, &["plugin:memory", "64M"])?;
    let config = disks.dir().join("vnvme.toml");
    let control = disks.dir().join("control.sock");
    let socket = |name: &str| disks.dir().join(format!("{name}.sock"));
    let disk = |name: &str, volume: &str| {
        format!(
            "[[controller]]\nsocket = \"{}\"\n[[controller.namespace]]\nvolume = \"{volume}\"\n",
            socket(name).display()
        )
    };
    let url = format!("{}&timeout=1s&reconnect-delay=5s", address.url());
    let text = [disk("other", "mem://64M"), disk("vm", &url)].concat();
    fs::write(&config, format!("[process]\nworkers = 1\n{text}"))?;
    let daemon = Daemon::builder("nbd-hangs")
        .config(&config, &socket("vm"))
        .arg("--control")
        .arg(&control)
        .start()?;
    let server_state = || -> Result<String> {
        let output = Command::new(program()?)
            .args(["stats", "--json", "--control"])
            .arg(&control)
            .output()?;
        let stats: serde_json::Value = serde_json::from_slice(&output.stdout)?;
        let device = &stats["devices"][0];
        let name = device["device"].as_str().unwrap_or_default();
        ensure!(name.starts_with("nbd+unix:///?socket="), "{stats}");
        Ok(device["state"].as_str().unwrap_or_default().to_owned())
    };
    let wait_state = |state: &str| -> Result<()> {
        let began = Instant::now();
        while server_state()? != state {
            ensure!(began.elapsed() < LIMIT, "not {state}: {}", daemon.log()?);
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    };
    verified(&load(&daemon, 1)?.wait_with_output()?, &daemon)?;
    wait_state("live")?;
    server.signal(rustix::process::Signal::STOP)?;
    let hangs = load(&daemon, 1)?;
    wait_state("connecting")?;
    daemon.wait_log("no answer to a request", LIMIT)?;
    // The disk beside it.
    verified(&load_of(&socket("other"), 2)?.wait_with_output()?, &daemon)?;
    let output = hangs.wait_with_output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(!output.status.success(), "{said}");
    ensure!(said.contains("Controller Pathing Error"), "{said}");
    daemon.wait_log("requests fail until it is back", LIMIT)?;
    server.signal(rustix::process::Signal::CONT)?;
    wait_state("live")?;
    verified(&load(&daemon, 1)?.wait_with_output()?, &daemon)?;
    daemon.terminate()
}

/// A disk that is added to a daemon in its sandbox: on a server that its list has, and on no other.
#[test]
fn disks_are_added_on_allowed_servers_only() -> Result<()> {
    let Some(tree) = tree(&NBDKIT) else {
        return Ok(());
    };
    let disks = Disks::new()?;
    let dir = tempfile::Builder::new().prefix("vnvme-").tempdir()?;
    let places = [
        ListenAddress::Tcp(port()?),
        ListenAddress::Unix(dir.path().join("nbd.sock")),
    ];
    let memory = ["plugin:memory", "64M"];
    let start = || -> Result<Vec<_>> {
        let servers = places.iter();
        servers
            .map(|address| nbdkit(&tree, address, &memory))
            .collect()
    };
    let servers = start()?;
    let path = |name: &str| dir.path().join(name).display().to_string();
    let config = disks.dir().join("vnvme.toml");
    let allow = [dir.path().display().to_string(), places[0].url()];
    fs::write(
        &config,
        format!(
            "[process]\ncontrol = \"{}\"\nallow = [\"{}\", \"{}\", \"{}\"]\n\
             [[controller]]\nsocket = \"{}\"\n\
             [[controller.namespace]]\nvolume = \"mem://1M\"\n",
            path("control"),
            allow[0],
            allow[1],
            places[1].url(),
            path("first")
        ),
    )?;
    let daemon = Daemon::builder("nbd-added")
        .managed(&config, &dir.path().join("first"))
        .start()?;
    let add = |name: &str, url: &str| {
        Command::new(program()?)
            .args(["add", "--control", &path("control"), "controller", url])
            .args([format!("name={name}"), format!("socket={}", path(name))])
            .output()
            .context("vnvme add")
    };
    for (name, address) in ["tcp", "unix"].into_iter().zip(&places) {
        let added = add(name, &address.url())?;
        let said = String::from_utf8_lossy(&added.stderr).into_owned();
        ensure!(added.status.success(), "{name}: {said}\n{}", daemon.log()?);
        verified(
            &load_of(&dir.path().join(name), 1)?.wait_with_output()?,
            &daemon,
        )?;
    }
    let other = ListenAddress::Tcp(port()?);
    let _other = nbdkit(&tree, &other, &memory)?;
    let refused = add("other", &other.url())?;
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(!refused.status.success(), "another server was connected to");
    ensure!(said.contains("write allow = ["), "{said}");
    // They are connected to again, from within the sandbox.
    drop(servers);
    let _servers = start()?;
    for name in ["tcp", "unix"] {
        verified(
            &load_of(&dir.path().join(name), 1)?.wait_with_output()?,
            &daemon,
        )?;
    }
    daemon.terminate()
}

#[test]
fn qemu_nbd_image_has_right_contents() -> Result<()> {
    let Some(tree) = tree(&QEMU) else {
        return Ok(());
    };
    let disks = Disks::new()?;
    let image = disks.dir().join("disk.qcow2").display().to_string();
    tree.run("qemu-img", &["create", "-q", "-f", "qcow2", &image, "64M"])?;
    let socket = disks.dir().join("qemu.sock");
    let server = qemu_nbd(&tree, &socket, &image)?;
    let url = format!("nbd+unix:///vm0?socket={}&connections=2", socket.display());
    let daemon = Daemon::builder("qemu-nbd").volume(url).start()?;
    verified(&load(&daemon, 3)?.wait_with_output()?, &daemon)?;
    daemon.terminate()?;
    server.signal(rustix::process::Signal::TERM)?;
    server.wait(LIMIT)?;
    tree.run("qemu-img", &["check", "-q", &image])?;
    Ok(())
}

#[test]
fn guest_verifies_while_nbd_server_is_killed() -> Result<()> {
    if Controller::chosen()? != Controller::Vnvme {
        skip("nbd::guest", "the tests run against QEMU's controller");
        return Ok(());
    }
    let Some(tree) = tree(&NBDKIT) else {
        return Ok(());
    };
    let disks = Disks::new()?;
    let disk = disks.sparse("disk.raw", 256)?;
    let address = ListenAddress::Unix(disks.dir().join("nbd.sock"));
    let file = disk.display().to_string();
    let words = ["plugin:file", file.as_str()];
    let mut server = nbdkit(&tree, &address, &words)?;
    let daemon = Daemon::builder("nbd-guest").volume(address.url()).start()?;
    let guest = Guest::builder("nbd").vfio_user(daemon.socket()).boot()?;
    let fio = std::thread::scope(|scope| -> Result<()> {
        let work = scope.spawn(|| {
            run_for(
                &guest,
                Duration::from_secs(240),
                "d=$(wait_disk 1 1)
                 fio --name=v --filename=$d --ioengine=io_uring --direct=1 --rw=randrw --bsrange=4k-512k \
                     --size=64m --iodepth=16 --fsync=50 --verify=crc32c --verify_fatal=1 \
                     --verify_state_save=0 >/dev/null
                 mkfs.ext4 -q $d; mkdir -p /tmp/m; mount $d /tmp/m; cp -r /bin /tmp/m/; umount /tmp/m
                 fsck.ext4 -fn $d
                 blkdiscard -o 0 -l $((64 << 20)) $d
                 blkdiscard -z -o $((64 << 20)) -l $((16 << 20)) $d
                 nvme flush $d",
            )
        });
        while !work.is_finished() {
            std::thread::sleep(Duration::from_secs(2));
            server.kill()?;
            server = nbdkit(&tree, &address, &words)?;
        }
        work.join().expect("the guest's work")?;
        Ok(())
    });
    fio.with_context(|| daemon.log().unwrap_or_default())?;
    guest.poweroff()?;
    daemon.terminate()
}
