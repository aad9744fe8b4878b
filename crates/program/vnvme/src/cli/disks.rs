//! `vnvme list`, `show`, `add` and `remove`.

use super::given;
use super::instances::{self, AllInstances, Unanswered};
use super::table::{Column, TextTable, size};
use super::target::{DaemonTarget, DiskName};
use anyhow::Result;
use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use config::disk::KINDS;
use control::Client;
use control::api::{Disk, DiskKind, Namespace, OfGuest};
use output::outln;
use serde::Serialize;
use serde_json::json;

/// Options of `vnvme list`.
#[derive(Args)]
pub struct ListArgs {
    #[command(flatten)]
    target: DaemonTarget,
    #[command(flatten)]
    all: AllInstances,
}

/// Disk of one of several instances.
#[derive(Serialize)]
struct InstanceDisk {
    instance: String,
    #[serde(flatten)]
    disk: Disk,
}

/// Output of `vnvme list --all`.
#[derive(Serialize)]
struct AllDisks {
    disks: Vec<InstanceDisk>,
    unanswered: Vec<Unanswered>,
}

impl ListArgs {
    /// Prints all disks of a process, or of all processes.
    pub fn run(self) -> Result<()> {
        if self.all.all {
            return self.run_all();
        }
        let mut disks = self.target.client()?.disks()?;
        disks.iter_mut().for_each(name_program);
        self.target.print(&disks, |disks| {
            let mut table = TextTable::new(COLUMNS);
            disks.iter().for_each(|disk| table.row(cells(disk)));
            table.print()?;
            let mut disks = disks.iter();
            disks.try_for_each(|disk| print_state("", disk))
        })
    }

    fn run_all(&self) -> Result<()> {
        let instances = instances::find(&self.target.socket)?;
        let answers = instances::ask_all(&instances, Client::disks);
        let mut all = AllDisks {
            disks: Vec::new(),
            unanswered: answers.unanswered,
        };
        for (instance, disks) in answers.answers {
            for mut disk in disks {
                name_program(&mut disk);
                let instance = instance.clone();
                all.disks.push(InstanceDisk { instance, disk });
            }
        }
        self.target.print(&all, |all| {
            let [a, b, c, d, e, f, g, h, i] = COLUMNS;
            let columns = [Column::Left("INSTANCE"), a, b, c, d, e, f, g, h, i];
            let mut table = TextTable::new(columns);
            for one in &all.disks {
                let [a, b, c, d, e, f, g, h, i] = cells(&one.disk);
                table.row([one.instance.clone(), a, b, c, d, e, f, g, h, i]);
            }
            table.print()?;
            let mut disks = all.disks.iter();
            disks.try_for_each(|one| print_state(&format!("{} ", one.instance), &one.disk))
        })?;
        instances::check(&all.unanswered)
    }
}

/// Columns of the list of disks.
const COLUMNS: [Column; 9] = [
    Column::Left("NAME"),
    Column::Left("KIND"),
    Column::Left("STATE"),
    Column::Left("CLIENT"),
    Column::Right("SIZE"),
    Column::Left("SERIAL"),
    Column::Left("NGUID"),
    Column::Left("VOLUME"),
    Column::Left("AT"),
];

/// Returns a disk's row in the list of disks.
fn cells(disk: &Disk) -> [String; 9] {
    [
        disk.name.clone(),
        disk.kind.to_string(),
        disk.state.name().to_owned(),
        client(disk),
        size(disk.namespaces.iter().map(|ns| ns.bytes).sum()),
        disk.serial.clone().unwrap_or_else(|| "-".to_owned()),
        of_all(disk, |namespace| namespace.nguid.as_deref()),
        of_all(disk, |namespace| Some(&namespace.volume)),
        at(disk).to_owned(),
    ]
}

/// Prints a line with the reason why a disk is not served, and lines for its failing namespaces.
fn print_state(start: &str, disk: &Disk) -> Result<()> {
    if let Some(why) = &disk.error {
        outln!("{start}{} is not served: {why}", disk.name);
    }
    print_trouble(&format!("{start}{} ", disk.name), &disk.namespaces)
}

/// Returns a text of the disk's first namespace, and the number of its other namespaces.
fn of_all(disk: &Disk, text: impl Fn(&Namespace) -> Option<&str>) -> String {
    let first = disk.namespaces.first().and_then(text).unwrap_or("-");
    match disk.namespaces.len() {
        0 | 1 => first.to_owned(),
        count => format!("{first} and {} more", count - 1),
    }
}

/// Adds the name of the client's program. A process that has ended meanwhile has none.
fn name_program(disk: &mut Disk) {
    if let Some(client) = &mut disk.client {
        let comm = std::fs::read_to_string(format!("/proc/{}/comm", client.pid));
        // Any process chooses its own name, and this one goes to a terminal.
        client.program = comm
            .ok()
            .map(|comm| comm.trim_end().escape_debug().to_string());
    }
}

/// Returns the path at which users find the disk: its device or socket.
fn at(disk: &Disk) -> &str {
    let device = disk.device.as_ref();
    device.or(disk.socket.as_ref()).map_or("", |place| place)
}

fn client(disk: &Disk) -> String {
    let client = match &disk.client {
        Some(client) => {
            let program = client.program.as_deref().unwrap_or("unknown program");
            format!("{program} (pid {}, uid {})", client.pid, client.uid)
        }
        None if disk.kind == DiskKind::Ublk && disk.attached => "the kernel".to_owned(),
        None => "-".to_owned(),
    };
    if disk.not_kept {
        format!("{client}, not kept")
    } else if disk.not_yet_kept {
        format!("{client}, not yet kept")
    } else {
        client
    }
}

/// Prints a line for each namespace whose requests fail.
fn print_trouble(start: &str, namespaces: &[Namespace]) -> Result<()> {
    for namespace in namespaces {
        if let Some(trouble) = &namespace.trouble {
            outln!("{start}namespace {}: {trouble}", namespace.nsid);
        }
    }
    Ok(())
}

/// Prints a disk for people.
fn print(disk: &Disk) -> Result<()> {
    outln!("{}  ({})", disk.name, disk.kind);
    outln!(
        "  {} at {}   client {}",
        disk.state.name(),
        at(disk),
        client(disk)
    );
    if let Some(serial) = &disk.serial {
        outln!("  serial {serial}");
    }
    if let Some(why) = &disk.error {
        outln!("  not served: {why}");
    }
    if disk.not_kept {
        outln!("  not kept: no keeper is left, and the disk ends with its process");
    } else if disk.not_yet_kept {
        outln!("  not yet kept: the keeper is slow, and the disk would end with its process");
    }
    print_namespaces(&disk.namespaces)?;
    print_trouble("  ", &disk.namespaces)?;
    for namespace in &disk.namespaces {
        if let Some(unit) = namespace.atomic_unit {
            let unit = size(unit.into());
            outln!(
                "  namespace {}: writes within units of {unit} are atomic",
                namespace.nsid
            );
        }
        if let Some(of_guest) = namespace.of_guest {
            let state = match of_guest {
                OfGuest::Allocated => "not attached",
                OfGuest::Attached => "attached",
            };
            let nsid = namespace.nsid;
            outln!("  namespace {nsid}: the guest has made it; {state}");
        }
        if let (Some(group), Some(state)) = (namespace.ana_group, namespace.ana_state) {
            let state = state.name();
            outln!(
                "  namespace {} in ANA group {group}: {state}",
                namespace.nsid
            );
        }
    }
    Ok(())
}

/// Prints namespaces for people.
pub fn print_namespaces(namespaces: &[Namespace]) -> Result<()> {
    let mut table = TextTable::new([
        Column::Right("  NSID"),
        Column::Right("SIZE"),
        Column::Right("BLOCK"),
        Column::Left("ACCESS"),
        Column::Left("PATH"),
        Column::Left("NGUID"),
        Column::Left("VOLUME"),
    ]);
    let mut encrypted = Vec::new();
    for namespace in namespaces {
        if namespace.encrypted {
            encrypted.push(namespace.nsid.to_string());
        }
        let access = if namespace.read_only {
            "read-only"
        } else {
            "read-write"
        };
        table.row([
            namespace.nsid.to_string(),
            size(namespace.bytes),
            namespace.block_size.to_string(),
            access.to_owned(),
            namespace.path.map_or("-", |path| path.name()).to_owned(),
            namespace.nguid.clone().unwrap_or_else(|| "-".to_owned()),
            namespace.volume.clone(),
        ]);
    }
    table.print()?;
    if !encrypted.is_empty() {
        outln!("  encrypted (LUKS): namespace {}", encrypted.join(", "));
    }
    Ok(())
}

/// Output of `vnvme show`.
#[derive(Serialize)]
struct Shown {
    #[serde(flatten)]
    disk: Disk,
    process: Processes,
}

/// Process IDs of the processes that serve a disk.
#[derive(Serialize)]
struct Processes {
    /// Process ID of the serving process.
    pid: u32,
    /// Process ID of the keeper, if there is one.
    keeper: Option<u32>,
}

/// Options of `vnvme show`.
#[derive(Args)]
pub struct ShowArgs {
    #[command(flatten)]
    disk: DiskName,
    #[command(flatten)]
    target: DaemonTarget,
}

impl ShowArgs {
    /// Prints a disk and its processes.
    pub fn run(self) -> Result<()> {
        let client = self.target.client()?;
        let mut disk = client.disk(&self.disk.name)?;
        name_program(&mut disk);
        let process = client.stats()?.measured.process;
        let shown = Shown {
            disk,
            process: Processes {
                pid: process.pid,
                keeper: process.keeper,
            },
        };
        self.target.print(&shown, |shown| {
            print(&shown.disk)?;
            let keeper = shown.process.keeper;
            let keeper = keeper.map_or(String::new(), |pid| format!(", its keeper {pid}"));
            outln!("  served by process {}{keeper}", shown.process.pid);
            Ok(())
        })
    }
}

/// Returns the parser of a kind of disk.
fn kind_parser() -> impl TypedValueParser<Value = DiskKind> {
    let values = KINDS.iter().map(|kind| {
        let value = PossibleValue::new(kind.name());
        value.help(kind.description())
    });
    PossibleValuesParser::new(values).try_map(|name| {
        let mut kinds = KINDS.iter().copied();
        kinds.find(|kind| kind.name() == name).ok_or("unknown kind")
    })
}

/// Options of `vnvme add`.
#[derive(Args)]
pub struct AddArgs {
    /// Kind of disk
    #[arg(value_parser = kind_parser(), value_name = "KIND")]
    kind: DiskKind,
    /// Keys of the disk's table in a configuration file, like socket=/run/vm1.sock, and volumes; a
    /// controller gets a namespace for each volume
    #[arg(required = true, value_name = "KEY=VALUE|VOLUME")]
    words: Vec<String>,
    #[command(flatten)]
    target: DaemonTarget,
}

impl AddArgs {
    /// Adds the disk.
    pub fn run(self) -> Result<()> {
        let table = given::disk(self.kind, &self.words)?;
        let disk = self.target.client()?.add(self.kind, table)?;
        self.target.print(&disk, print)
    }
}

/// Options of `vnvme accept`.
#[derive(Args)]
pub struct AcceptArgs {
    #[command(flatten)]
    disk: DiskName,
    #[command(flatten)]
    target: DaemonTarget,
}

impl AcceptArgs {
    /// Confirms the volumes that an unavailable disk has been found to have.
    pub fn run(self) -> Result<()> {
        let name = &self.disk.name;
        self.target.client()?.accept(name)?;
        let answer = json!({ "accepted": name });
        self.target.print(&answer, |_| {
            outln!("{name} has its new volumes, and is tried again");
            Ok(())
        })
    }
}

/// Options of `vnvme remove`.
#[derive(Args)]
pub struct RemoveArgs {
    #[command(flatten)]
    disk: DiskName,
    /// Remove the disk even while a client is attached, which loses it
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    target: DaemonTarget,
}

impl RemoveArgs {
    /// Removes the disk.
    pub fn run(self) -> Result<()> {
        let name = &self.disk.name;
        self.target.client()?.remove(name, self.force)?;
        let answer = json!({ "removed": name });
        self.target.print(&answer, |_| {
            outln!("{name} is removed");
            Ok(())
        })
    }
}
