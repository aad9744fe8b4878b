//! Hosts that break the protocol, fall silent, or take more than their part.

use super::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::net::SocketAddr;
use std::sync::mpsc::channel;

/// Sends bytes in place of a command on an I/O queue, and returns the outcome.
fn breaks(host: Host, bytes: impl FnOnce(&mut Queue) -> Vec<u8>) -> Other {
    let served = Served::new(Setup::memory(4 << 20));
    let client = Client::new(served.address, host);
    let mut queue = client.queue(1, 32);
    let mut other = client.queue(2, 32);
    let bytes = bytes(&mut queue);
    queue.stream.write_all(&bytes).unwrap();
    let end = queue.ends();
    // The others go on.
    assert_eq!(read(&mut other, 0, 512), [0; 512]);
    end
}

#[test]
fn protocol_violation_ends_own_queue_only() {
    let plain = Host::default();
    let command = |queue: &Queue, data: u32| {
        queue
            .writer
            .command(&transfer(NvmOpcode::WRITE, 0, 1), data)
            .to_vec()
    };
    let terminated = |fes| Other::Terminated(fes);
    assert_eq!(
        breaks(plain, |_| vec![0x5a; 128]),
        terminated(fes::SEQUENCE)
    );
    assert_eq!(
        breaks(plain, |queue| command(queue, 8193)),
        terminated(fes::LIMIT)
    );
    assert_eq!(
        breaks(plain, |queue| command(queue, u32::MAX - 80)),
        terminated(fes::LIMIT)
    );
    assert_eq!(
        breaks(plain, |queue| queue
            .writer
            .h2c_data(1, 1, 0, 512, true)
            .to_vec()),
        terminated(fes::HEADER_FIELD)
    );
    let changed = |at: usize, to: u8| {
        breaks(plain, |queue| {
            let mut pdu = command(queue, 0);
            pdu[at] = to;
            pdu
        })
    };
    assert_eq!(changed(0, 7), terminated(fes::SEQUENCE));
    assert_eq!(changed(2, 24), terminated(fes::HEADER_FIELD));
    assert_eq!(changed(4, 71), terminated(fes::HEADER_FIELD));
    assert_eq!(changed(1, 1), terminated(fes::HEADER_FIELD));
    let bad_digest = breaks(host(true, false), |queue| {
        let mut pdu = command(queue, 0);
        *pdu.last_mut().unwrap() ^= 1;
        pdu
    });
    assert_eq!(bad_digest, terminated(fes::HEADER_DIGEST));
    // A host that ends it itself.
    assert_eq!(
        breaks(plain, |_| nvme_tcp::Violation::Last.h2c_term_req().to_vec()),
        Other::Closed
    );
}

/// A write with data beyond what was asked for, sent twice, or for another command.
#[test]
fn unsolicited_data_ends_connection() {
    for wrong in 0..5 {
        let served = Served::new(Setup::memory(4 << 20));
        let client = Client::new(served.address, Host::default());
        let mut queue = client.queue(1, 32);
        let len = 64 << 10;
        let mut command = transfer(NvmOpcode::WRITE, 0, len / 512);
        command.set_sgl(SglDescriptor::transport(len));
        let asked = CommandInfo {
            data_out: len,
            ..CommandInfo::default()
        };
        let cid = queue.send(command, asked, &[]);
        let (_, tag, ..) = queue.wait_transfer().unwrap();
        match wrong {
            0 => queue.send_data(cid, tag, 0, &vec![1; len as usize + 4], true),
            1 => queue.send_data(cid, tag, 4, &[1; 512], false),
            2 => queue.send_data(cid ^ 0x100, tag, 0, &[1; 512], false),
            3 => queue.send_data(cid, tag ^ 1, 0, &[1; 512], false),
            _ => queue.send_data(cid, tag, 0, &[1; 512], true),
        }
        assert!(
            matches!(queue.ends(), Other::Terminated(_) | Other::Closed),
            "{wrong}"
        );
        let mut other = client.queue(2, 32);
        assert_eq!(read(&mut other, 0, 512), [0; 512], "nothing was written");
    }
}

#[test]
fn data_with_wrong_digest_is_not_written() {
    let served = Served::new(Setup::memory(4 << 20));
    let client = Client::new(served.address, host(false, true));
    let mut queue = client.queue(1, 32);
    let mut command = transfer(NvmOpcode::WRITE, 0, 8);
    command.set_sgl(SglDescriptor::in_capsule(0, 4096));
    let cid = queue
        .commands
        .insert(CommandInfo::default(), Vec::new())
        .unwrap();
    command.cid = cid.into();
    let mut pdu = queue.writer.command(&command, 4096).to_vec();
    pdu.extend([7; 4096]);
    pdu.extend((digest::crc32c(&[7; 4096]) ^ 1).to_le_bytes());
    queue.stream.write_all(&pdu).unwrap();
    let status = queue.wait(cid).unwrap().0.status();
    assert!(status.is(Status::TRANSIENT_TRANSPORT_ERROR) && !status.dnr());
    // The connection continues, and nothing was written.
    assert_eq!(read(&mut queue, 0, 4096), [0; 4096]);
    assert_eq!(write(&mut queue, 0, &[7; 4096]), Status::SUCCESS);
    assert_eq!(read(&mut queue, 0, 4096), [7; 4096]);
}

#[test]
fn silent_host_is_dropped_after_keep_alive() {
    let served = Served::new(Setup::memory(1 << 20));
    let mut admin = Queue::open(served.address, Host::default());
    let entry = admin.connect(0, 32, CNTLID_DYNAMIC, |connect, _| connect.kato = 2000);
    assert!(entry.status().is_success());
    // As long as it says something it stays.
    let began = Instant::now();
    let cc = Cc::new()
        .with_en(true)
        .with_iosqes(6)
        .with_iocqes(4)
        .into_bits();
    admin.execute(Property::set(0, regs::CC as u32, cc), 0);
    while began.elapsed() < Duration::from_secs(3) {
        let alive = Command::new(AdminOpcode::KEEP_ALIVE.0, 0, 0);
        assert_eq!(admin.execute(alive, 0).0, Status::SUCCESS);
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(served.hosts(), 1);
    assert_eq!(admin.ends(), Other::Closed);
    served.wait_for_hosts(0);
}

/// A worker that did not run finds the timeout passed, and the host's command unread.
#[test]
fn host_whose_keep_alive_a_late_worker_reads_stays() {
    const TIMEOUT: Duration = Duration::from_millis(500);
    let served = Served::new(Setup::memory(1 << 20));
    let mut admin = Client::new(served.address, Host::default()).admin;
    let socket = admin.stream.try_clone().unwrap();
    let ((stands, still), (go, gone_on)) = (channel(), channel());
    // The worker runs until it has answered the command that starts the timer.
    served.handle.post(move |worker| {
        while !is_readable(&socket) {
            worker.poll_once().unwrap();
        }
        stands.send(()).unwrap();
        gone_on.recv().unwrap();
    });
    let mut set = Command::new(AdminOpcode::SET_FEATURES.0, 0, 0);
    set.cdw10 = u32::from(Fid::KEEP_ALIVE_TIMER.0).into();
    set.cdw11 = (TIMEOUT.as_millis() as u32).into();
    set.set_sgl(SglDescriptor::transport(0));
    let set = admin.send(set, CommandInfo::default(), &[]);
    still.recv_timeout(BOUND).unwrap();
    assert!(admin.wait(set).unwrap().0.status().is_success());
    let mut alive = Command::new(AdminOpcode::KEEP_ALIVE.0, 0, 0);
    alive.set_sgl(SglDescriptor::transport(0));
    let alive = admin.send(alive, CommandInfo::default(), &[]);
    std::thread::sleep(TIMEOUT * 2);
    go.send(()).unwrap();
    assert!(admin.wait(alive).unwrap().0.status().is_success());
    // The timer has not ended with its last command either: only now it runs.
    assert_eq!(served.hosts(), 1);
    assert_eq!(admin.ends(), Other::Closed);
    served.wait_for_hosts(0);
}

fn is_readable(socket: &TcpStream) -> bool {
    let mut fds = [PollFd::new(socket, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec::default())).unwrap() > 0
}

#[test]
fn controller_reset_ends_io_queues() {
    let served = Served::new(Setup::memory(4 << 20));
    let mut client = Client::new(served.address, Host::default());
    for round in 0..3 {
        let mut queue = client.queue(1, 32);
        assert_eq!(write(&mut queue, 0, &pattern(round, 4096)), Status::SUCCESS);
        // Commands are in flight.
        for _ in 0..20 {
            let mut command = transfer(NvmOpcode::READ, 0, 2048);
            command.set_sgl(SglDescriptor::transport(1 << 20));
            let asked = CommandInfo {
                data_in: 1 << 20,
                ..CommandInfo::default()
            };
            queue.send(command, asked, &[]);
        }
        client.set_cc(Cc::new());
        let began = Instant::now();
        while client.csts().rdy() {
            assert!(began.elapsed() < BOUND);
        }
        assert_eq!(queue.ends(), Other::Closed);
        client.enable();
    }
    let mut queue = client.queue(1, 32);
    assert_eq!(read(&mut queue, 0, 4096), pattern(2, 4096));
}

/// A host that asks for much and reads nothing has what it was given, and others are served.
#[test]
fn host_without_reads_uses_bounded_memory() {
    let options = NullOptions {
        size: 1 << 30,
        ..NullOptions::default()
    };
    let mut setup = Setup::new(Arc::new(NullVolume::new(options).unwrap()));
    setup.limits = TargetLimits {
        memory: 4 << 20,
        ..TargetLimits::default()
    };
    let served = Served::new(setup);
    let client = Client::new(served.address, Host::default());
    let mut greedy = client.queue(1, 128);
    greedy
        .stream
        .set_write_timeout(Some(Duration::from_secs(1)))
        .unwrap();
    let mut sent = 0;
    for number in 0..10_000u16 {
        let mut command = transfer(NvmOpcode::READ, 0, 2048);
        command.set_sgl(SglDescriptor::transport(1 << 20));
        command.cid = number.into();
        let pdu = greedy.writer.command(&command, 0).to_vec();
        if greedy.stream.write_all(&pdu).is_err() {
            break;
        }
        sent += 1;
    }
    println!("{sent} commands went");
    let other = Client::new(served.address, Host::default());
    let mut queue = other.queue(1, 32);
    for _ in 0..100 {
        read(&mut queue, 0, 64 << 10);
    }
    // The greedy host's own other queue waits for memory, and continues when the greedy one is
    // closed.
    drop(greedy);
    let mut queue = client.queue(2, 32);
    read(&mut queue, 0, 64 << 10);
}

#[test]
fn silent_connections_are_closed_and_block_nobody() {
    let mut setup = Setup::memory(1 << 20);
    setup.limits.newcomers = 4;
    setup.limits.handshake = Duration::from_secs(1);
    let served = Served::new(setup);
    let silent: Vec<TcpStream> = (0..12)
        .map(|_| TcpStream::connect(served.address).unwrap())
        .collect();
    // Half of an ICReq.
    let mut half = TcpStream::connect(served.address).unwrap();
    half.write_all(&Host::default().request()[..60]).unwrap();
    let client = Client::new(served.address, Host::default());
    let mut queue = client.queue(1, 8);
    read(&mut queue, 0, 512);
    for mut stream in silent {
        stream.set_read_timeout(Some(BOUND)).unwrap();
        assert_eq!(stream.read(&mut [0; 1]).unwrap_or(0), 0);
    }
    // Others that say the wrong thing.
    for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 200], &[0; 300]] {
        let mut stream = TcpStream::connect(served.address).unwrap();
        stream.write_all(bytes).unwrap();
        stream.set_read_timeout(Some(BOUND)).unwrap();
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
        assert!(rest.is_empty() || rest[0] == 3, "{rest:?}");
    }
    // A first command that is none, and one that is too long.
    let mut queue = Queue::open(served.address, Host::default());
    let (status, ..) = queue.execute(Property::get(0, 0, true), 0);
    assert!(status.is(Status::COMMAND_SEQUENCE_ERROR));
    assert_eq!(queue.ends(), Other::Closed);
    let mut queue = Queue::open(served.address, Host::default());
    let pdu = queue.writer.command(&Command::new(0x7f, 0, 1), 1 << 20);
    queue.stream.write_all(&pdu).unwrap();
    assert_eq!(queue.ends(), Other::Closed);
}

#[test]
fn abort_finds_command_of_host() {
    let served = Served::new(Setup::memory(1 << 20));
    let mut client = Client::new(served.address, Host::default());
    let mut abort = Command::new(AdminOpcode::ABORT.0, 0, 0);
    abort.cdw10 = (1 | 77 << 16).into();
    let (status, result, _) = client.admin.execute(abort, 0);
    assert_eq!((status, result), (Status::SUCCESS, 1));
}

/// The end of the worker, with hosts connected.
#[test]
fn worker_ends_with_hosts_connected() {
    let mut served = Served::new(Setup::memory(1 << 20));
    let client = Client::new(served.address, Host::default());
    let mut queue = client.queue(1, 32);
    assert_eq!(write(&mut queue, 0, &[1; 4096]), Status::SUCCESS);
    served.stop();
    assert_eq!(queue.ends(), Other::Closed);
    assert_eq!(served.hosts(), 0);
}

/// Writes that wait for their data have all the memory, and a capsule precedes that data on the
/// same connection: it is received all the same, and so is the data behind it.
#[test]
fn capsule_arrives_while_memory_waits_for_data() {
    let mut setup = Setup::memory(16 << 20);
    setup.limits.memory = 4 << 20;
    let served = Served::new(setup);
    let client = Client::new(served.address, Host::default());
    let mut queue = client.queue(1, 32);
    let len = 1 << 20;
    let blocks = len / 512;
    let mut large = Vec::new();
    for at in 0..5 {
        let mut command = transfer(NvmOpcode::WRITE, at * u64::from(blocks), blocks);
        command.set_sgl(SglDescriptor::transport(len));
        let asked = CommandInfo {
            data_out: len,
            ..CommandInfo::default()
        };
        large.push(queue.send(command, asked, &[]));
    }
    let asked: Vec<_> = (0..4).map(|_| queue.wait_transfer().unwrap()).collect();
    let mut small = Vec::new();
    for at in 0..6 {
        let mut command = transfer(NvmOpcode::WRITE, 16_384 + at * 16, 16);
        command.set_sgl(SglDescriptor::in_capsule(0, 8192));
        small.push(queue.send(command, CommandInfo::default(), &pattern(at as u8, 8192)));
    }
    for cid in small {
        assert_eq!(queue.wait(cid).unwrap().0.status(), Status::SUCCESS);
    }
    let place = |cid| large.iter().position(|large| *large == cid).unwrap();
    for (cid, tag, at, _) in asked {
        let data = pattern(100 + place(cid) as u8, len as usize);
        queue.send_data(cid, tag, at, &data, true);
    }
    // The fifth had no memory until now.
    let (cid, tag, at, _) = queue.wait_transfer().unwrap();
    assert_eq!(place(cid), 4);
    queue.send_data(cid, tag, at, &pattern(104, len as usize), true);
    for cid in &large {
        assert_eq!(queue.wait(*cid).unwrap().0.status(), Status::SUCCESS);
    }
    for at in 0..5 {
        let data = read(&mut queue, at * u64::from(blocks), len);
        assert!(data == pattern(100 + at as u8, len as usize), "{at}");
    }
    for at in 0..6 {
        assert_eq!(
            read(&mut queue, 16_384 + at * 16, 8192),
            pattern(at as u8, 8192)
        );
    }
}

/// A host that sends its bytes one by one is served as any other, and delays no other host.
#[test]
fn byte_by_byte_connection_is_served() {
    let served = Served::new(Setup::memory(1 << 20));
    let address = served.address;
    let slowly = |mut stream: &TcpStream, bytes: &[u8]| {
        for byte in bytes {
            stream.write_all(&[*byte]).unwrap();
            std::thread::sleep(Duration::from_micros(200));
        }
    };
    let client = Client::new(address, host(true, true));
    let mut other = client.queue(2, 32);
    let mut queue = client.queue(1, 32);
    let mut first = TcpStream::connect(address).unwrap();
    first.set_nodelay(true).unwrap();
    slowly(&first, &host(true, true).request());
    first.read_exact(&mut [0; 128]).unwrap();
    let data = pattern(3, 4096);
    let mut command = transfer(NvmOpcode::WRITE, 0, 8);
    command.set_sgl(SglDescriptor::in_capsule(0, 4096));
    let cid = queue
        .commands
        .insert(CommandInfo::default(), Vec::new())
        .unwrap();
    command.cid = cid.into();
    let mut pdu = queue.writer.command(&command, 4096).to_vec();
    pdu.extend(&data);
    pdu.extend(digest::crc32c(&data).to_le_bytes());
    let (half, rest) = pdu.split_at(pdu.len() / 2);
    slowly(&queue.stream, half);
    assert_eq!(read(&mut other, 0, 4096), [0; 4096]);
    slowly(&queue.stream, rest);
    assert_eq!(queue.wait(cid).unwrap().0.status(), Status::SUCCESS);
    assert_eq!(read(&mut other, 0, 4096), data);
}

/// More hosts than there may be, again and again, and I/O queues without end of one that fills its
/// Admin queue: each is refused or served, and closed ones make room.
#[test]
fn connections_beyond_limit_are_refused() {
    let mut setup = Setup::memory(1 << 20);
    setup.limits.associations = 8;
    setup.limits.queues = 4;
    let served = Served::new(setup);
    for _ in 0..3 {
        let mut kept = Vec::new();
        let mut busy = 0;
        for _ in 0..32 {
            let mut admin = Queue::open(served.address, Host::default());
            let entry = admin.connect(0, 32, CNTLID_DYNAMIC, |_, _| ());
            if entry.status().is_success() {
                kept.push(admin)
            } else {
                let status = entry.status().without_flags();
                assert_eq!(status, fabrics::status::CONNECT_CONTROLLER_BUSY);
                busy += 1;
            }
        }
        // The last place is for another address.
        assert_eq!((kept.len(), busy), (7, 25));
        drop(kept);
        served.wait_for_hosts(0);
    }
    let client = Client::new(served.address, Host::default());
    let mut queues: Vec<Queue> = (1..=4).map(|qid| client.queue(qid, 8)).collect();
    for round in 0..200u16 {
        let mut queue = Queue::open(served.address, Host::default());
        let entry = queue.connect(round % 6, 8, client.cntlid, |_, _| ());
        assert!(
            !entry.status().is_success() && entry.status().dnr(),
            "{round}"
        );
    }
    for queue in &mut queues {
        assert_eq!(read(queue, 0, 512), [0; 512]);
    }
}

/// Commands behind a reset in the same bytes: what was answered is not lost, and nothing is
/// answered twice.
#[test]
fn commands_around_reset_are_answered_once() {
    let served = Served::new(Setup::memory(1 << 20));
    let mut client = Client::new(served.address, Host::default());
    for _ in 0..20 {
        let admin = &mut client.admin;
        let mut pdus = Vec::new();
        let mut push = |command: Command, len: u32| {
            let mut command = command;
            command.set_sgl(SglDescriptor::transport(len));
            let asked = CommandInfo {
                data_in: len,
                ..CommandInfo::default()
            };
            let cid = admin.commands.insert(asked, Vec::new()).unwrap();
            command.cid = cid.into();
            pdus.extend_from_slice(&admin.writer.command(&command, 0));
            cid
        };
        let mut identify = Command::new(AdminOpcode::IDENTIFY.0, 0, 0);
        identify.cdw10 = IdentifyCdw10::new()
            .with_cns(Cns::CONTROLLER)
            .into_bits()
            .into();
        let before: Vec<u16> = (0..8).map(|_| push(identify, 4096)).collect();
        let reset = push(Property::set(0, regs::CC as u32, 0), 0);
        let after: Vec<u16> = (0..8).map(|_| push(identify, 4096)).collect();
        admin.stream.write_all(&pdus).unwrap();
        assert_eq!(admin.wait(reset).unwrap().0.status(), Status::SUCCESS);
        for cid in after {
            let status = admin.wait(cid).unwrap().0.status();
            assert!(status.is(Status::COMMAND_SEQUENCE_ERROR), "{status}");
        }
        let mut answered = 0;
        for cid in before {
            // A reset may have taken it; its identifier is not used again here.
            match admin.wait_within(cid, Duration::from_millis(20)) {
                Ok((entry, data)) => {
                    assert_eq!((entry.status(), data.len()), (Status::SUCCESS, 4096));
                    answered += 1;
                }
                Err(why) => assert_eq!(why, Other::Nothing),
            }
        }
        println!("{answered} of 8 answered before the reset");
        while client.csts().rdy() {}
        client.enable();
        let id = self::identify(&mut client.admin, Cns::CONTROLLER, 0);
        assert_eq!(id.len(), 4096);
    }
}

/// Connects from another address of the loopback network.
fn connect_from(address: &str, to: SocketAddr) -> TcpStream {
    let from: std::net::IpAddr = address.parse().unwrap();
    let socket = rustix::net::socket(
        rustix::net::AddressFamily::INET,
        rustix::net::SocketType::STREAM,
        None,
    );
    let socket = socket.unwrap();
    rustix::net::bind(&socket, &SocketAddr::new(from, 0)).unwrap();
    rustix::net::connect(&socket, &to).unwrap();
    socket.into()
}

/// Connects to the subsystem under a host name; returns the queue and the status.
fn admin_queue(served: &Served, hostnqn: &str) -> (Queue, Status) {
    let mut queue = Queue::open(served.address, Host::default());
    let entry = queue.connect(0, 32, CNTLID_DYNAMIC, |_, data| {
        data.hostnqn = Nqn::new(hostnqn).unwrap();
    });
    (queue, entry.status())
}

#[test]
fn silent_connections_displace_each_other_and_no_host() {
    let mut setup = Setup::memory(1 << 20);
    // Only displacement makes room.
    setup.limits.handshake = Duration::from_secs(3600);
    setup.limits.newcomers = 8;
    let served = Served::new(setup);
    let mut slow = TcpStream::connect(served.address).unwrap();
    let request = Host::default().request();
    slow.write_all(&request[..60]).unwrap();
    let silent: Vec<TcpStream> = (0..300)
        .map(|_| connect_from("127.0.0.2", served.address))
        .collect();
    // A host at the same address as the silent connections, and one at another address that began
    // before them.
    let new = connect_from("127.0.0.2", served.address);
    for (mut stream, sent) in [(new, 0), (slow, 60)] {
        stream.write_all(&request[sent..]).unwrap();
        stream.set_read_timeout(Some(BOUND)).unwrap();
        stream.read_exact(&mut [0; 128]).unwrap();
    }
    let client = Client::new(served.address, Host::default());
    let mut queue = client.queue(1, 8);
    read(&mut queue, 0, 512);
    // At most the eight places are still taken. The kernel decides which connections have them: it
    // accepts in another order when its backlog is full.
    for stream in &silent {
        stream.set_nonblocking(true).unwrap();
    }
    let is_open = |mut stream: &TcpStream| {
        let read = stream.read(&mut [0; 1]);
        read.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
    };
    let began = Instant::now();
    while silent.iter().filter(|stream| is_open(stream)).count() > 8 {
        assert!(began.elapsed() < BOUND);
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn host_with_many_associations_leaves_places_to_others() {
    let mut setup = Setup::memory(1 << 20);
    setup.limits.associations = 16;
    setup.limits.host_associations = 4;
    let served = Served::new(setup);
    let mut kept = Vec::new();
    for number in 0..8 {
        let (queue, status) = admin_queue(&served, "nqn.2014-08.org.vnvme:greedy");
        if number < 4 {
            assert_eq!(status, Status::SUCCESS);
            kept.push(queue);
        } else {
            // The host may try again later.
            assert_eq!(status, fabrics::status::CONNECT_CONTROLLER_BUSY);
        }
    }
    let client = Client::new(served.address, Host::default());
    read(&mut client.queue(1, 8), 0, 512);
}

#[test]
fn listed_host_finds_a_place_beside_greedy_ones() {
    let name = |number: u32| format!("nqn.2014-08.org.vnvme:listed-{number}");
    let mut setup = Setup::memory(1 << 20);
    setup.limits.associations = 4;
    setup.hosts = (0..3).map(name).collect();
    let served = Served::new(setup);
    let mut kept = Vec::new();
    let mut take = |number| {
        let (queue, status) = admin_queue(&served, &name(number));
        kept.push(queue);
        status
    };
    assert_eq!(take(0), Status::SUCCESS);
    assert_eq!(take(0), Status::SUCCESS);
    assert_eq!(take(0), fabrics::status::CONNECT_CONTROLLER_BUSY);
    assert_eq!(take(1), Status::SUCCESS);
    assert_eq!(take(1), fabrics::status::CONNECT_CONTROLLER_BUSY);
    assert_eq!(take(2), Status::SUCCESS);
}
