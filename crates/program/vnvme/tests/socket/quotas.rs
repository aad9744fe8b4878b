//! Limits of one client's memory, and neighbours on the same worker that are not affected.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};

use vfio_user::client::{Client, ClientError, Irqs};
use vfio_user::{DmaMapping, DmaUnmapping, Errno, IrqAction};

use crate::common::*;
use crate::keeper::kill_serving;

fn errno<T>(result: Result<T, ClientError>) -> Option<Errno> {
    match result {
        Err(ClientError::Refused { errno, .. }) => errno,
        _ => None,
    }
}

/// A daemon with two controllers on one worker, and a client of the second one, which runs all the
/// time.
struct Pair {
    daemon: Daemon,
    first: PathBuf,
    neighbour: Host,
    round: u64,
}

impl Pair {
    fn new(test_dir: &TestDir, args: &[&str]) -> Pair {
        let sockets = ["first.sock", "second.sock"].map(|name| test_dir.path(name));
        let config: String = sockets
            .iter()
            .map(|socket| {
                let socket = text(socket);
                format!(
                    "[[controller]]\nsocket = \"{socket}\"\n\
                     [[controller.namespace]]\nvolume = \"mem://1M\"\n"
                )
            })
            .collect();
        let path = test_dir.path("config.toml");
        std::fs::write(&path, config).unwrap();
        let path = text(&path);
        let mut all = vec!["serve", "--config", &path, "--workers", "1"];
        all.extend(args);
        let daemon = Daemon::spawn(&all);
        sockets
            .iter()
            .for_each(|socket| daemon.wait_listening(socket));
        let neighbour = Host::up(&sockets[1]);
        let [first, _] = sockets;
        Pair {
            daemon,
            first,
            neighbour,
            round: 0,
        }
    }

    fn client(&self) -> Client {
        Client::connect(self.first.clone(), WAIT_TIMEOUT).unwrap()
    }

    /// The neighbour's disk works.
    fn check(&mut self) {
        self.round += 1;
        let data = pattern(self.round, 4096);
        self.neighbour.write(1, 0, &data);
        assert!(self.neighbour.read(1, 0, 4096) == data);
    }

    fn end(self) {
        drop(self.neighbour);
        self.daemon.end();
    }
}

/// A memory file of a size, of which nothing is allocated.
fn sparse(size: u64) -> File {
    memfd(size)
}

fn unmap(client: &mut Client, map: DmaMapping) {
    let DmaMapping { iova, size, .. } = map;
    let unmapped = client.dma_unmap(DmaUnmapping::Range { iova, size });
    assert_eq!(unmapped.unwrap(), size);
}

#[test]
fn partial_page_windows_are_refused() {
    let test_dir = TestDir::new();
    let mut pair = Pair::new(&test_dir, &[]);
    let mut client = pair.client();
    let file = sparse(1 << 20);
    for (iova, size, offset) in [(1, 4096, 0), (0, 1, 0), (0, 4097, 0), (0, 4096, 512)] {
        let map = DmaMapping {
            offset,
            ..window(iova, size)
        };
        let refused = client.dma_map(map, Some(file.as_fd()));
        assert_eq!(errno(refused), Some(Errno::INVAL), "{map:?}");
        if offset == 0 {
            assert_eq!(errno(client.dma_map(map, None)), Some(Errno::INVAL));
        }
        pair.check();
    }
    client.dma_map(window(0, 4096), Some(file.as_fd())).unwrap();
    drop(client);
    pair.end();
}

/// A disk's pages may come from anywhere: the log names the kind of file to use instead.
#[test]
fn files_other_than_memory_are_refused() {
    let test_dir = TestDir::new();
    let path = test_dir.path("memory");
    let file = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(path)
        .unwrap();
    file.set_len(1 << 20).unwrap();
    if rustix::fs::fcntl_get_seals(&file).is_ok() {
        return testkit::skip(
            "vnvme::quotas::files_other_than_memory_are_refused",
            "/tmp is in memory",
        );
    }
    let mut pair = Pair::new(&test_dir, &[]);
    let mut client = pair.client();
    let refused = client.dma_map(window(0, 1 << 20), Some(file.as_fd()));
    assert_eq!(errno(refused), Some(Errno::INVAL));
    pair.daemon
        .wait_log(|line| line.contains("memory-backend-memfd"));
    pair.check();
    let memory = sparse(1 << 20);
    client
        .dma_map(window(0, 1 << 20), Some(memory.as_fd()))
        .unwrap();
    drop(client);
    pair.end();
}

#[test]
fn client_windows_are_limited_to_reported_maximum() {
    let test_dir = TestDir::new();
    let mut pair = Pair::new(&test_dir, &["--client-windows", "100"]);
    let mut client = pair.client();
    assert_eq!(client.server_capabilities().max_dma_maps, 100);
    let at = |i: u64| window(i * 8192, 4096);
    for i in 0..100 {
        client.dma_map(at(i), None).unwrap();
    }
    assert_eq!(errno(client.dma_map(at(100), None)), Some(Errno::NOSPC));
    pair.check();
    unmap(&mut client, at(7));
    client.dma_map(at(100), None).unwrap();
    drop(client);
    pair.end();
}

#[test]
fn client_memory_files_are_limited() {
    let test_dir = TestDir::new();
    let mut pair = Pair::new(
        &test_dir,
        &["--client-files", "3", "--client-memory", "64M"],
    );
    let mut client = pair.client();
    let at = |i: u64| window(i << 30, 4096);
    let files: Vec<File> = (0..5).map(|_| sparse(4096)).collect();
    let map = |client: &mut Client, i: u64| client.dma_map(at(i), Some(files[i as usize].as_fd()));
    for i in 0..3 {
        map(&mut client, i).unwrap();
    }
    assert_eq!(errno(map(&mut client, 3)), Some(Errno::NOSPC));
    pair.check();
    // Windows on files that are mapped cost nothing.
    client.dma_map(at(9), Some(files[0].as_fd())).unwrap();
    unmap(&mut client, at(1));
    eventually("a file less is mapped", || map(&mut client, 3).is_ok());
    unmap(&mut client, at(3));
    unmap(&mut client, at(2));
    // Bytes are those of the files, not of windows.
    let (half, less) = (sparse(48 << 20), sparse(16 << 20));
    eventually("its memory is free", || {
        client.dma_map(at(4), Some(half.as_fd())).is_ok()
    });
    // A file that was unmapped counts until every worker has forgotten it.
    eventually("the bytes are the limit, no longer the files", || {
        let refused = client.dma_map(at(5), Some(less.as_fd()));
        let refused = errno(refused).expect("64 MiB are more than the client may map");
        assert!([Errno::NOSPC, Errno::NOMEM].contains(&refused), "{refused}");
        refused == Errno::NOMEM
    });
    pair.check();
    // The next client has an account of its own.
    leave(client);
    let mut client = pair.client();
    client.dma_map(at(0), Some(less.as_fd())).unwrap();
    client.dma_map(at(1), Some(half.as_fd())).unwrap();
    let refused = client.dma_map(at(2), Some(files[0].as_fd()));
    assert_eq!(errno(refused), Some(Errno::NOMEM));
    pair.check();
    drop(client);
    pair.end();
}

/// Sparse files of absurd sizes: the address space is never full, and failures are messages.
#[test]
fn client_cannot_exhaust_address_space() {
    let test_dir = TestDir::new();
    // The largest possible option, so that the process's own bound applies.
    let mut pair = Pair::new(&test_dir, &["--client-memory", "4096T"]);
    let mut client = pair.client();
    let mut refused = 0;
    for i in 0..100u64 {
        let file = sparse(2 << 40);
        let map = window(i << 41, 2 << 40);
        match client.dma_map(map, Some(file.as_fd())) {
            Ok(()) => assert_eq!(refused, 0),
            error => {
                assert_eq!(errno(error), Some(Errno::NOMEM));
                refused += 1;
            }
        }
    }
    assert!(refused > 30, "{refused} of 100");
    pair.check();
    // Another client finds room as soon as this client has disconnected.
    leave(client);
    let mut client = pair.client();
    let file = sparse(32 << 40);
    let map = window(0, 32 << 40);
    eventually("the addresses are free again", || {
        client.dma_map(map, Some(file.as_fd())).is_ok()
    });
    pair.check();
    drop(client);
    pair.end();
}

/// The maximum number of windows on memory, and then none: their resources are returned.
#[test]
fn client_resources_are_returned() {
    let test_dir = TestDir::new();
    let mut pair = Pair::new(&test_dir, &[]);
    pair.check();
    let pid = pair.daemon.pid();
    let open = pair.daemon.settled_descriptors();
    let before = status_kib(pid, "VmRSS");
    let client = pair.client();
    let most = client.server_capabilities().max_dma_maps;
    leave(client);
    for _ in 0..2 {
        let mut client = pair.client();
        let file = sparse(most * 4096);
        for i in 0..most {
            let map = DmaMapping {
                offset: (i * 37 % most) * 4096,
                ..window(i * 8192, 4096)
            };
            client.dma_map(map, Some(file.as_fd())).unwrap();
        }
        pair.check();
        leave(client);
        pair.check();
    }
    pair.daemon.wait_descriptors(open);
    let mut after = 0;
    eventually("memory is returned", || {
        after = status_kib(pid, "VmRSS");
        after <= before + before / 10
    });
    pair.check();
    pair.end();
}

/// Clients of 31 disks send all the descriptors that they may. The keeper has no room for all of
/// them, and keeps the client of another disk that attaches afterwards.
#[test]
fn greedy_clients_leave_room_in_keeper_for_neighbour() {
    const GREEDY: usize = 31;
    let test_dir = TestDir::new();
    let socket = |number: usize| test_dir.path(&format!("{number}.sock"));
    let disks = (0..GREEDY + 2).map(|number| {
        let socket = text(&socket(number));
        format!(
            "[[controller]]\nsocket = \"{socket}\"\nnamespace = [{{ volume = \"mem://1M\" }}]\n"
        )
    });
    let config = test_dir.path("config.toml");
    std::fs::write(&config, disks.collect::<String>()).unwrap();
    let ready = test_dir.path("ready");
    let manager = UnixDatagram::bind(&ready).unwrap();
    manager.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
    // The keeper has half of these descriptors.
    let script = "ulimit -n 4096 && export NOTIFY_SOCKET=$1 && shift && exec \"$0\" \"$@\"";
    let (ready, config) = (text(&ready), text(&config));
    let args = ["serve", "--config", &config, "--keeper", "process"];
    let shell = ["-c", script, env!("CARGO_BIN_EXE_vnvme"), &ready];
    let daemon = Daemon::spawn_program(Path::new("sh"), &[&shell[..], &args].concat());
    assert!(manager.recv(&mut [0; 64]).unwrap() > 0);
    let event = new_eventfd();
    // An interrupt for each queue.
    let vectors = [Some(event.as_fd()); 65];
    let files: Vec<File> = (0..16).map(|_| sparse(4096)).collect();
    let clients = (0..GREEDY).map(|number| {
        let mut client = Client::connect(socket(number), WAIT_TIMEOUT).unwrap();
        let irqs = Irqs::Eventfds(&vectors);
        client.set_irqs(MSIX, 0, IrqAction::Trigger, irqs).unwrap();
        for (file, at) in files.iter().zip(0..) {
            client
                .dma_map(window(at << 30, 4096), Some(file.as_fd()))
                .unwrap();
        }
        client
    });
    let clients: Vec<Client> = clients.collect();
    daemon.wait_log(|line| line.contains("will not outlive its process"));
    let mut neighbours = [GREEDY, GREEDY + 1].map(|number| Host::up(&socket(number)));
    let data = pattern(1, 4096);
    neighbours
        .iter_mut()
        .for_each(|host| host.write(1, 0, &data));
    for _ in 0..2 {
        kill_serving(&daemon);
        for host in &mut neighbours {
            assert!(host.read(1, 0, data.len()) == data);
        }
    }
    drop((clients, neighbours));
    daemon.end();
}
