//! Live migration of a guest with an NVMe controller between two processes that serve one file.

use crate::common::*;
use crate::keeper;
use dma::Memory;
use std::fs;
use std::ops::Range;
use std::os::fd::AsFd;
use std::path::PathBuf;
use test_host::{Command, Host as NvmeHost, Link, Pair, Shadow, Windows, vmm};
use vfio_user::client::{Client, ClientError, Irqs};
use vfio_user::{Errno, IrqAction, MigrationState, wire};

const BASE: u64 = 0x1_0000_0000;
const RAM: u64 = 16 << 20;
const DISK: u64 = 32 << 20;
const ENTRIES: u32 = 16;
/// Bytes of each write and read, and their offset in the first of two pages.
const DATA: u64 = 6 << 10;
const IN_PAGE: u64 = 0x200;
/// Commands that each queue has outstanding when the guest stops.
const DEPTH: u64 = 4;

/// Offsets in guest memory. The guest writes submission queues, PRP lists, shadow doorbells and the
/// data of writes; the device writes completion queues, EventIdx and the data of reads.
const AT_SQ: u64 = 0x0000;
const AT_CQ: u64 = 0x8_0000;
const AT_SHADOW: u64 = 0x10_0000;
const AT_EVENT_IDX: u64 = 0x10_1000;
const AT_ADMIN: u64 = 0x10_2000;
const AT_WRITES: u64 = 0x20_0000;
const AT_READS: u64 = 0x80_0000;

/// Memory that the guest writes, as its hypervisor would tell.
const GUEST: [Range<u64>; 3] = [AT_SQ..AT_CQ, AT_SHADOW..AT_EVENT_IDX, AT_WRITES..AT_READS];

/// Two processes that serve one file: the first with its lock, the second as an incoming disk.
struct Servers {
    test_dir: TestDir,
    daemons: Vec<Daemon>,
}

impl Servers {
    fn start(more: &str) -> Self {
        Self::start_with("off", more)
    }

    fn start_with(keeper: &str, more: &str) -> Self {
        Self::start_on("", keeper, more)
    }

    /// `options`: those of the volume's URL.
    fn start_on(options: &str, keeper: &str, more: &str) -> Self {
        let test_dir = TestDir::new();
        test_dir.disk("disk.raw", DISK);
        let mut servers = Self {
            test_dir,
            daemons: Vec::new(),
        };
        servers.add("a", options, keeper, more);
        let incoming = format!("incoming = true\n{more}");
        servers.add("b", options, keeper, &incoming);
        servers
    }

    fn socket(&self, name: &str) -> PathBuf {
        self.test_dir.path(&format!("{name}.sock"))
    }

    fn add(&mut self, name: &str, options: &str, keeper: &str, more: &str) {
        let config = self.test_dir.path(&format!("{name}.toml"));
        let socket = self.socket(name);
        let disk = text(&self.test_dir.path("disk.raw")) + options;
        let neighbour = self.socket(&format!("{name}-neighbour"));
        let text_of_file = format!(
            "[[controller]]\nsocket = {socket:?}\nserial = \"VM1\"\nio-queues = 64\n{more}\n\
             [[controller.namespace]]\nvolume = {disk:?}\n\
             [[controller]]\nsocket = {neighbour:?}\nserial = \"N{name}\"\n\
             [[controller.namespace]]\nvolume = \"mem://8M\"\n"
        );
        fs::write(&config, text_of_file).unwrap();
        let config = text(&config);
        let args = ["serve", "--keeper", keeper, "--config", &config];
        let daemon = if keeper == "off" {
            let daemon = Daemon::spawn(&args);
            daemon.wait_listening(&socket);
            daemon
        } else {
            keeper::start(&self.test_dir, &args)
        };
        self.daemons.push(daemon);
    }

    /// Connects to a server and gives it memory and receivers of interrupts.
    fn connect(&self, name: &str, ram: &Memory) -> Link {
        let mut link = Link::new(Client::connect(self.socket(name), WAIT_TIMEOUT).unwrap());
        link.map(BASE, RAM, ram.fd()).unwrap();
        let event = new_eventfd();
        let fds = [Some(event.as_fd())];
        let irqs = Irqs::Eventfds(&fds);
        let client = &mut link.client;
        client.set_irqs(MSIX, 0, IrqAction::Trigger, irqs).unwrap();
        link
    }

    fn end(self) {
        for daemon in self.daemons {
            assert!(daemon.end().status.success());
        }
    }
}

fn memory() -> Memory {
    Memory::from_fd(memfd(RAM).into(), RAM, true).unwrap()
}

/// A guest with several queue pairs, which verifies what it reads.
struct Guest {
    host: NvmeHost,
    ram: Memory,
    pairs: u16,
    round: u64,
    /// Data of the last completed write of each place on the disk, by its seed.
    disk: Vec<u64>,
    /// Number of commands without a completion of each queue.
    outstanding: Vec<u64>,
}

fn pattern_of(seed: u64) -> Vec<u8> {
    match seed {
        0 => vec![0; DATA as usize],
        seed => pattern(seed, DATA as usize),
    }
}

impl Guest {
    fn boot(link: Link, ram: Memory, pairs: u16, shadow: bool) -> Self {
        let windows = Windows::new(BASE, ram.clone());
        let mut host = NvmeHost::new(link, windows, WAIT_TIMEOUT);
        host.set_command(6).unwrap();
        let pair = |qid: u16| {
            let at = u64::from(qid) * 0x1000;
            Pair::new(BASE + AT_SQ + at, BASE + AT_CQ + at, ENTRIES)
        };
        host.enable(pair(0)).unwrap();
        for qid in 1..=pairs {
            host.create_pair(qid, pair(qid), Some(0)).unwrap();
        }
        if shadow {
            let shadow = Shadow {
                doorbells: BASE + AT_SHADOW,
                event_idx: BASE + AT_EVENT_IDX,
            };
            host.use_shadow(shadow).unwrap();
        }
        Guest {
            host,
            ram,
            pairs,
            round: 0,
            disk: vec![0; (usize::from(pairs) + 1) * DEPTH as usize],
            outstanding: vec![0; usize::from(pairs) + 1],
        }
    }

    /// Number of a place of data, in memory and on the disk.
    fn place(qid: u16, slot: u64) -> u64 {
        u64::from(qid) * DEPTH + slot
    }

    fn offset(area: u64, qid: u16, slot: u64) -> u64 {
        area + Self::place(qid, slot) * 0x2000 + IN_PAGE
    }

    fn transfer(opcode: u8, area: u64, qid: u16, slot: u64) -> Command {
        let iova = BASE + Self::offset(area, qid, slot);
        Command::new(opcode, 1)
            .prp(iova, iova - IN_PAGE + 0x1000)
            .slba(Self::place(qid, slot) * DATA / 512)
            .dw(12, (DATA / 512 - 1) as u32)
    }

    /// Submits writes in all queues, and leaves them outstanding.
    fn submit_writes(&mut self) {
        for (qid, slot) in self.places() {
            self.round += 1;
            self.disk[Self::place(qid, slot) as usize] = self.round;
            let at = Self::offset(AT_WRITES, qid, slot);
            let data = pattern_of(self.round);
            self.ram.write(at as usize, &data).unwrap();
            let command = Self::transfer(1, AT_WRITES, qid, slot);
            self.host.submit(qid, &command).unwrap();
            self.outstanding[usize::from(qid)] += 1;
        }
    }

    /// Submits reads of everything, and leaves them outstanding.
    fn submit_reads(&mut self) {
        for (qid, slot) in self.places() {
            let command = Self::transfer(2, AT_READS, qid, slot);
            self.host.submit(qid, &command).unwrap();
            self.outstanding[usize::from(qid)] += 1;
        }
    }

    fn places(&self) -> Vec<(u16, u64)> {
        let queues = 1..=self.pairs;
        let places = queues.flat_map(|qid| (0..DEPTH).map(move |slot| (qid, slot)));
        places.collect()
    }

    /// Waits for all completions, each exactly once.
    fn reap(&mut self) {
        for qid in 1..=self.pairs {
            for _ in 0..std::mem::take(&mut self.outstanding[usize::from(qid)]) {
                assert_eq!(self.host.wait(qid).unwrap().status_bits(), 0);
            }
            assert!(self.host.poll(qid).unwrap().is_none());
        }
    }

    /// Compares what was read with what was written.
    fn verify(&self) {
        for (qid, slot) in self.places() {
            let mut data = vec![0; DATA as usize];
            let at = Self::offset(AT_READS, qid, slot);
            self.ram.read(at as usize, &mut data).unwrap();
            let wanted = pattern_of(self.disk[Self::place(qid, slot) as usize]);
            assert!(data == wanted, "queue {qid}, {slot}");
        }
    }

    fn identify(&mut self) {
        let identify = Command::new(6, 0).prp(BASE + AT_ADMIN, 0).dw(10, 1);
        self.host.admin(&identify).unwrap();
    }

    /// Begins to move the guest, and runs it meanwhile.
    fn begin(&mut self, servers: &Servers, to: &str) -> vmm::Move {
        let ram = memory();
        let target = servers.connect(to, &ram);
        // Commands are outstanding when the log begins.
        self.submit_reads();
        let source = &mut self.host.link;
        let mut moved = vmm::Move::begin(source, target, BASE, self.ram.clone(), ram).unwrap();
        self.reap();
        self.submit_writes();
        moved.copy_dirty(&mut self.host.link, &GUEST).unwrap();
        self.reap();
        self.submit_reads();
        moved.copy_dirty(&mut self.host.link, &GUEST).unwrap();
        self.reap();
        self.verify();
        moved
    }

    /// Moves the guest to the other server under load. The connection to the source ends.
    fn migrate(&mut self, servers: &Servers, to: &str) {
        let mut moved = self.begin(servers, to);
        self.identify();
        self.submit_reads();
        self.reap();
        // The guest stops with outstanding commands.
        self.submit_writes();
        let state = moved.stop(&mut self.host.link, &GUEST).unwrap();
        assert_eq!(moved.differences().unwrap(), [0u64; 0]);
        let ram = moved.to.clone();
        self.host.link = moved.start(&state).unwrap();
        self.host.ram = Windows::new(BASE, ram.clone());
        self.ram = ram;
        self.go_on();
    }

    /// Continues after the guest has stopped with outstanding commands.
    fn go_on(&mut self) {
        self.reap();
        self.submit_reads();
        self.reap();
        self.verify();
        self.identify();
    }
}

fn refused(result: Result<(), ClientError>) -> Errno {
    match result {
        Err(ClientError::Refused { errno, .. }) => errno.unwrap(),
        other => panic!("{other:?}"),
    }
}

/// Migrates a guest there and back several times.
fn back_and_forth(servers: &Servers, pairs: u16, shadow: bool, times: usize) {
    let ram = memory();
    let mut guest = Guest::boot(servers.connect("a", &ram), ram, pairs, shadow);
    for time in 0..times {
        guest.migrate(servers, ["b", "a"][time % 2]);
    }
}

#[test]
fn guest_migrates_back_and_forth_under_load() {
    for (pairs, shadow) in [(1, false), (1, true), (4, false), (4, true)] {
        let servers = Servers::start("");
        back_and_forth(&servers, pairs, shadow, 6);
        servers.end();
    }
}

#[test]
fn guest_with_many_queues_migrates() {
    for shadow in [false, true] {
        let servers = Servers::start("");
        back_and_forth(&servers, 64, shadow, 4);
        servers.end();
    }
}

#[test]
fn disk_with_keeper_migrates_and_survives_afterwards() {
    let servers = Servers::start_with("process", "");
    let ram = memory();
    let mut guest = Guest::boot(servers.connect("a", &ram), ram, 2, true);
    guest.migrate(&servers, "b");
    guest.migrate(&servers, "a");
    guest.migrate(&servers, "b");
    keeper::kill_serving(&servers.daemons[1]);
    guest.submit_writes();
    guest.go_on();
    guest.migrate(&servers, "a");
    drop(guest);
    servers.end();
}

#[test]
fn restarted_incoming_disk_waits_for_lock_again() {
    let servers = Servers::start_with("process", "");
    let (ram, second) = (memory(), memory());
    let mut guest = Guest::boot(servers.connect("a", &ram), ram, 1, false);
    // The client of the incoming disk waits, and the source has the lock.
    let target = servers.connect("b", &second);
    keeper::kill_serving(&servers.daemons[1]);
    drop(target);
    guest.migrate(&servers, "b");
    guest.migrate(&servers, "a");
    drop(guest);
    servers.end();
}

#[test]
fn former_source_gives_volume_up_after_failed_way_back() {
    let servers = Servers::start("");
    let ram = memory();
    let mut guest = Guest::boot(servers.connect("a", &ram), ram, 1, false);
    guest.migrate(&servers, "b");
    let mut moved = guest.begin(&servers, "a");
    guest.submit_writes();
    let state = moved.stop(&mut guest.host.link, &GUEST).unwrap();
    // The former source gets its volume again, and its client leaves.
    let mut target = moved.cancel();
    vmm::load(&mut target, &state).unwrap();
    let client = &mut target.client;
    client.set_migration_state(MigrationState::Running).unwrap();
    drop(target);
    let client = &mut guest.host.link.client;
    client.set_migration_state(MigrationState::Running).unwrap();
    client.stop_log().unwrap();
    guest.go_on();
    guest.migrate(&servers, "a");
    servers.end();
}

#[test]
fn cancelled_migration_leaves_guest_at_source() {
    let servers = Servers::start("");
    let ram = memory();
    let mut guest = Guest::boot(servers.connect("a", &ram), ram, 2, true);
    for _ in 0..2 {
        let mut moved = guest.begin(&servers, "b");
        guest.submit_writes();
        moved.stop(&mut guest.host.link, &GUEST).unwrap();
        drop(moved.cancel());
        let client = &mut guest.host.link.client;
        client.set_migration_state(MigrationState::Running).unwrap();
        client.stop_log().unwrap();
        guest.go_on();
    }
    // The destination has the state, but was not started.
    let mut moved = guest.begin(&servers, "b");
    guest.submit_writes();
    let state = moved.stop(&mut guest.host.link, &GUEST).unwrap();
    let mut target = moved.cancel();
    vmm::load(&mut target, &state).unwrap();
    let client = &mut guest.host.link.client;
    client.set_migration_state(MigrationState::Running).unwrap();
    client.stop_log().unwrap();
    guest.go_on();
    drop(target);
    guest.migrate(&servers, "b");
    servers.end();
}

#[test]
fn bad_state_is_refused_and_source_continues() {
    let servers = Servers::start("");
    let ram = memory();
    let mut guest = Guest::boot(servers.connect("a", &ram), ram, 1, false);
    let mut moved = guest.begin(&servers, "b");
    guest.submit_writes();
    let state = moved.stop(&mut guest.host.link, &GUEST).unwrap();
    let mut target = moved.cancel();
    let mut newer = state.clone();
    newer[8] += 1;
    let mut corrupted = state.clone();
    *corrupted.last_mut().unwrap() ^= 1;
    for bad in [&[][..], &state[..state.len() / 2], &corrupted, &newer] {
        let error = vmm::load(&mut target, bad).unwrap_err();
        let refusal = error.downcast::<ClientError>().unwrap();
        assert_eq!(refused(Err(refusal)), Errno::INVAL);
        assert_eq!(target.client.migration_state().unwrap(), 0);
        let run = target.client.set_migration_state(MigrationState::Running);
        assert_eq!(refused(run), Errno::INVAL);
        target.client.reset().unwrap();
        assert_eq!(target.client.migration_state().unwrap(), 2);
    }
    servers.daemons[1].wait_log(|line| line.contains("version 2, this program reads 1"));
    let client = &mut guest.host.link.client;
    client.set_migration_state(MigrationState::Running).unwrap();
    client.stop_log().unwrap();
    guest.go_on();
    // The refused states have left nothing behind.
    drop(target);
    guest.migrate(&servers, "b");
    servers.end();
}

/// Returns the CRC-32 of a state's payload.
fn checksum(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg());
    !bytes
        .iter()
        .fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
}

#[test]
fn forged_states_beside_neighbour_gain_nothing() {
    let servers = Servers::start("");
    let ram = memory();
    let mut guest = Guest::boot(servers.connect("a", &ram), ram, 2, true);
    let mut moved = guest.begin(&servers, "b");
    let state = moved.stop(&mut guest.host.link, &GUEST).unwrap();
    assert_eq!(checksum(&state[20..]).to_le_bytes(), state[16..20]);
    let mut target = moved.cancel();
    let mut neighbour = Host::up(&servers.socket("b-neighbour"));
    let data = pattern(9, 64 << 10);
    neighbour.write(1, 0, &data);
    let bytes: Vec<usize> = pattern(77, 8 * 150)
        .chunks(8)
        .map(|word| u64::from_le_bytes(word.try_into().unwrap()) as usize)
        .collect();
    let mut accepted = 0;
    for at in bytes {
        let mut forged = state.clone();
        let len = forged.len() - 20;
        forged[20 + at % len] ^= 1 << (at >> 32 & 7);
        let sum = checksum(&forged[20..]);
        forged[16..20].copy_from_slice(&sum.to_le_bytes());
        if vmm::load(&mut target, &forged).is_ok() {
            accepted += 1;
            target
                .client
                .set_migration_state(MigrationState::Running)
                .unwrap();
        }
        target.client.reset().unwrap();
    }
    println!("{accepted} forged states were accepted");
    assert_eq!(neighbour.read(1, 0, data.len()), data);
    drop(target);
    drop(neighbour);
    // The source's guest continues, as soon as the other side has given the volume back.
    let client = &mut guest.host.link.client;
    client.set_migration_state(MigrationState::Running).unwrap();
    client.stop_log().unwrap();
    guest.go_on();
    servers.end();
}

#[test]
fn state_of_another_disk_is_refused() {
    let servers = Servers::start("");
    let others = Servers::start("mdts = 3");
    let (ram, other_ram) = (memory(), memory());
    let mut guest = Guest::boot(servers.connect("a", &ram), ram, 1, false);
    let mut moved = guest.begin(&servers, "b");
    let state = moved.stop(&mut guest.host.link, &GUEST).unwrap();
    let mut other = others.connect("b", &other_ram);
    vmm::load(&mut other, &state).unwrap_err();
    others.daemons[1].wait_log(|line| line.contains("was shown a disk with MDTS"));
}

#[test]
fn only_transitions_and_features_of_protocol_are_accepted() {
    let servers = Servers::start("");
    let ram = memory();
    let mut link = servers.connect("a", &ram);
    let client = &mut link.client;
    for (feature, operation, is_there) in [
        (wire::feature::MIGRATION, wire::feature::GET, true),
        (wire::feature::MIGRATION, wire::feature::SET, false),
        (wire::feature::MIG_DEVICE_STATE, wire::feature::SET, true),
        (wire::feature::DMA_LOGGING_START, wire::feature::SET, true),
        (wire::feature::DMA_LOGGING_REPORT, wire::feature::GET, true),
        (0, wire::feature::GET, false),
        (9, wire::feature::GET, false),
    ] {
        let probed = client.probe_feature(feature, operation).unwrap();
        assert_eq!(probed, is_there, "{feature} {operation:#x}");
    }
    assert_eq!(
        refused(client.set_migration_state(MigrationState::Error)),
        Errno::INVAL
    );
    assert_eq!(refused(client.stop_log()), Errno::INVAL);
    assert_eq!(
        refused(client.dirty_pages(BASE, RAM, 4096).map(drop)),
        Errno::INVAL
    );
    client.start_log(&[(BASE, RAM)]).unwrap();
    assert_eq!(refused(client.start_log(&[(BASE, RAM)])), Errno::BUSY);
    assert_eq!(
        refused(client.dirty_pages(BASE, RAM, 1000).map(drop)),
        Errno::INVAL
    );
    assert_eq!(
        refused(client.dirty_pages(BASE, 1 << 50, 4096).map(drop)),
        Errno::INVAL
    );
    for (length, page_size) in [(1 << 63, 1 << 63), ((32 << 30) + 1, 1 << 30)] {
        let report = client.dirty_pages(0, length, page_size);
        assert_eq!(refused(report.map(drop)), Errno::INVAL);
    }
    let largest = client.dirty_pages(0, 32 << 30, 1 << 30);
    assert_eq!(largest.unwrap().len(), 1);
    assert_eq!(client.dirty_pages(BASE, RAM, 4096).unwrap().len(), 64);
    assert_eq!(refused(client.read_state(10).map(drop)), Errno::INVAL);
    assert_eq!(refused(client.write_state(&[1])), Errno::INVAL);
    client
        .set_migration_state(MigrationState::Resuming)
        .unwrap();
    assert_eq!(refused(client.read_state(10).map(drop)), Errno::INVAL);
    client.write_state(&[1; 100]).unwrap();
    assert_eq!(
        refused(client.set_migration_state(MigrationState::StopCopy)),
        Errno::INVAL
    );
    client.reset().unwrap();
    assert_eq!(client.migration_state().unwrap(), 2);
    servers.end();
}

#[test]
fn disk_that_cannot_migrate_says_so() {
    let test_dir = TestDir::new();
    let disk = test_dir.disk("disk.raw", DISK);
    let config = test_dir.path("c.toml");
    let socket = test_dir.socket();
    let table = format!(
        "[[controller]]\nsocket = {socket:?}\ncmb-size = \"2M\"\n\
         [[controller.namespace]]\nvolume = {disk:?}\n"
    );
    fs::write(&config, table).unwrap();
    let daemon = Daemon::spawn(&["serve", "--config", &text(&config)]);
    daemon.wait_listening(&socket);
    let mut client = Client::connect(&socket, WAIT_TIMEOUT).unwrap();
    assert_eq!(refused(client.migration_flags().map(drop)), Errno::NOTSUP);
    drop(client);
    daemon.end();
    let test_dir = TestDir::new();
    let daemon = Daemon::serve(&test_dir, &["mem://8M"]);
    let mut client = Client::connect(test_dir.socket(), WAIT_TIMEOUT).unwrap();
    assert_eq!(refused(client.migration_flags().map(drop)), Errno::NOTSUP);
    drop(client);
    daemon.end();
}

#[test]
fn guest_boots_from_incoming_disk_when_volume_is_free() {
    let servers = Servers::start("");
    let (ram, second) = (memory(), memory());
    let mut guest = Guest::boot(servers.connect("a", &ram), ram, 1, false);
    guest.submit_writes();
    guest.reap();
    // Nobody has handed the volume over: the guest waits for it.
    let link = servers.connect("b", &second);
    let other = std::thread::spawn(move || {
        let mut other = Guest::boot(link, second, 1, false);
        other.submit_writes();
        other.go_on();
    });
    let mut servers = servers;
    drop(guest);
    let first = servers.daemons.remove(0);
    assert!(first.end().status.success());
    other.join().unwrap();
    servers.end();
}

/// Commands that the device has fetched end before its state is saved, however long they take.
#[test]
fn outstanding_commands_end_before_guest_moves() {
    let servers = Servers::start_on("?iops=50&burst=1ms", "off", "");
    back_and_forth(&servers, 1, false, 2);
    servers.end();
}

#[test]
fn stopped_disk_executes_nothing_until_it_runs() {
    let servers = Servers::start("");
    let ram = memory();
    let mut guest = Guest::boot(servers.connect("a", &ram), ram, 1, false);
    let client = &mut guest.host.link.client;
    client.set_migration_state(MigrationState::Stop).unwrap();
    guest.submit_writes();
    // More rounds of the worker than a write takes.
    for _ in 0..1000 {
        let state = guest.host.link.client.migration_state().unwrap();
        assert_eq!(state, MigrationState::Stop as u32);
    }
    assert!(guest.host.poll(1).unwrap().is_none());
    let client = &mut guest.host.link.client;
    client.set_migration_state(MigrationState::Running).unwrap();
    guest.go_on();
    drop(guest);
    servers.end();
}
