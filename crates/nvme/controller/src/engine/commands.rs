//! Table of the I/O commands of the NVM command set and of zoned namespaces. A row of the table
//! determines dispatch, the Commands Supported and Effects log page, and ONCS of Identify
//! Controller.
//!
//! The fast path (`run`) executes plain reads and writes without this table, and leaves all other
//! commands to it.

use super::Execution;
use nvme::identify::Oncs;
use nvme::log::CommandEffects;
use nvme::{Command, NvmOpcode as Op, Status};
use reservations::CommandGroup;

/// Function that starts an I/O command fetched from queue `sqid`, or returns the status with which
/// it fails.
type Handler = fn(&mut Execution<'_>, sqid: u16, &Command) -> Result<(), Status>;

/// Returns the [`Handler`] that calls this method of [`Execution`].
macro_rules! start {
    ($method:ident) => {
        |execution, sqid, command| execution.$method(sqid, command)
    };
}

/// Table row of an I/O command.
struct IoCommand {
    opcode: Op,
    /// Handler for a namespace of the NVM command set; `None` when such namespaces do not support
    /// the command.
    handler: Option<Handler>,
    /// Handler of the command on zoned namespaces; `None` when these do not support the command.
    zoned: Option<Handler>,
    /// Handler for a namespace with metadata; `None` when such namespaces do not support the
    /// command.
    metadata: Option<Handler>,
    effects: CommandEffects,
    oncs: Oncs,
    /// Reservation group that decides with which reservations the command conflicts.
    group: Option<CommandGroup>,
    /// Function that returns whether a controller with these properties supports the command.
    offered: fn(Offer) -> bool,
}

/// Kind of a namespace, which decides the commands it supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NamespaceType {
    /// NVM command set, without metadata.
    Plain,
    /// Zoned namespace command set.
    Zoned,
    /// NVM command set, with metadata.
    Metadata,
}

/// Properties of a controller that decide the commands it supports.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offer {
    /// Whether the controller belongs to a subsystem, and therefore supports reservations.
    pub shared: bool,
    /// Whether a namespace of the controller has placement handles (Flexible Data Placement).
    pub placed: bool,
    /// Whether the controller supports Write Uncorrectable, which marks blocks as unreadable.
    pub marks: bool,
}

impl IoCommand {
    const fn new(opcode: Op, handler: Handler, effects: CommandEffects) -> Self {
        IoCommand {
            opcode,
            handler: Some(handler),
            zoned: Some(handler),
            metadata: Some(handler),
            effects,
            oncs: Oncs::new(),
            group: None,
            offered: |_| true,
        }
    }

    /// Creates the row of a command that only zoned namespaces support.
    const fn of_zones(opcode: Op, handler: Handler, effects: CommandEffects) -> Self {
        IoCommand {
            handler: None,
            metadata: None,
            ..Self::new(opcode, handler, effects)
        }
    }

    /// Sets a different handler for zoned namespaces.
    const fn zoned(self, handler: Handler) -> Self {
        IoCommand {
            zoned: Some(handler),
            ..self
        }
    }

    /// Removes the command from zoned namespaces.
    const fn not_zoned(self) -> Self {
        IoCommand {
            zoned: None,
            ..self
        }
    }

    /// Sets a different handler for namespaces with metadata.
    const fn with_metadata(self) -> Self {
        IoCommand {
            metadata: Some(start!(with_metadata)),
            ..self
        }
    }

    /// Removes the command from namespaces with metadata.
    const fn not_with_metadata(self) -> Self {
        IoCommand {
            metadata: None,
            ..self
        }
    }

    /// Marks the command as reading a namespace.
    const fn reads(self) -> Self {
        IoCommand {
            group: Some(CommandGroup::Read),
            ..self
        }
    }

    /// Marks the command as changing a namespace, or as making changes durable.
    const fn writes(self) -> Self {
        IoCommand {
            group: Some(CommandGroup::Write),
            ..self
        }
    }

    const fn of(&self, sort: NamespaceType) -> Option<Handler> {
        match sort {
            NamespaceType::Zoned => self.zoned,
            NamespaceType::Metadata => self.metadata,
            NamespaceType::Plain => self.handler,
        }
    }

    /// Creates the row of a reservation command.
    const fn reservation(opcode: Op, effects: CommandEffects) -> Self {
        IoCommand {
            offered: |offer| offer.shared,
            ..Self::new(opcode, start!(reservation), effects).oncs(Oncs::new().with_reservs(true))
        }
    }

    /// Creates the row of a command that only namespaces with placement handles support.
    const fn of_placement(opcode: Op, handler: Handler, effects: CommandEffects) -> Self {
        IoCommand {
            offered: |offer| offer.placed,
            ..Self::new(opcode, handler, effects)
        }
    }

    /// Restricts the command to controllers for which `offered` returns `true`.
    const fn offered_if(self, offered: fn(Offer) -> bool) -> Self {
        IoCommand { offered, ..self }
    }

    /// Sets the ONCS bit by which Identify Controller reports support of the command.
    const fn oncs(self, oncs: Oncs) -> Self {
        IoCommand { oncs, ..self }
    }
}

/// Commands Supported and Effects entry of an I/O command that changes no data.
const NOTHING: CommandEffects = CommandEffects::new();
/// Commands Supported and Effects entry of an I/O command that changes data (LBCC).
const CONTENT: CommandEffects = CommandEffects::new().with_lbcc(true);

/// Table of all I/O commands, searched by opcode.
static COMMANDS: &[IoCommand] = &[
    IoCommand::new(Op::FLUSH, start!(flush), NOTHING).writes(),
    IoCommand::new(Op::WRITE, start!(read_write), CONTENT)
        .writes()
        .zoned(start!(zoned_write))
        .with_metadata(),
    IoCommand::new(Op::READ, start!(read_write), NOTHING)
        .reads()
        .with_metadata(),
    IoCommand::new(
        Op::WRITE_UNCORRECTABLE,
        start!(write_uncorrectable),
        CONTENT,
    )
    .writes()
    .not_zoned()
    .not_with_metadata()
    .oncs(Oncs::new().with_nvmwusv(true))
    .offered_if(|offer| offer.marks),
    IoCommand::new(Op::COMPARE, start!(compare), NOTHING)
        .reads()
        .with_metadata()
        .oncs(Oncs::new().with_nvmcmps(true)),
    IoCommand::new(Op::WRITE_ZEROES, start!(write_zeroes), CONTENT)
        .writes()
        .zoned(start!(zoned_write))
        .with_metadata()
        .oncs(Oncs::new().with_nvmwzsv(true)),
    IoCommand::new(Op::DATASET_MANAGEMENT, start!(dataset_management), CONTENT)
        .writes()
        .oncs(Oncs::new().with_nvmdsmsv(true)),
    IoCommand::new(Op::VERIFY, start!(verify), NOTHING)
        .reads()
        .with_metadata()
        .oncs(Oncs::new().with_nvmvfys(true)),
    IoCommand::new(Op::COPY, start!(copy), CONTENT)
        .writes()
        .not_zoned()
        .oncs(Oncs::new().with_nvmcpys(true)),
    IoCommand::reservation(Op::RESERVATION_REGISTER, NOTHING),
    IoCommand::reservation(Op::RESERVATION_REPORT, NOTHING),
    IoCommand::reservation(Op::RESERVATION_ACQUIRE, NOTHING),
    IoCommand::reservation(Op::RESERVATION_RELEASE, NOTHING),
    IoCommand::of_placement(
        Op::IO_MANAGEMENT_RECEIVE,
        start!(io_management_receive),
        NOTHING,
    )
    .reads()
    .not_zoned(),
    IoCommand::of_placement(Op::IO_MANAGEMENT_SEND, start!(io_management_send), NOTHING)
        .writes()
        .not_zoned(),
    IoCommand::of_zones(Op::ZONE_MANAGEMENT_SEND, start!(zone_send), CONTENT).writes(),
    IoCommand::of_zones(Op::ZONE_MANAGEMENT_RECEIVE, start!(zone_receive), NOTHING).reads(),
    IoCommand::of_zones(Op::ZONE_APPEND, start!(zoned_write), CONTENT).writes(),
];

/// Returns the handler of a command for namespaces of this kind; `None` when the controller does
/// not support it for them.
pub(super) fn handler(opcode: Op, offer: Offer, sort: NamespaceType) -> Option<Handler> {
    let command = offered(offer).find(|command| command.opcode == opcode)?;
    command.of(sort)
}

/// Returns the reservation group of a command, if it may conflict with reservations.
pub(super) fn group(opcode: Op) -> Option<CommandGroup> {
    let command = COMMANDS.iter().find(|command| command.opcode == opcode)?;
    command.group
}

fn offered(offer: Offer) -> impl Iterator<Item = &'static IoCommand> {
    let commands = COMMANDS.iter();
    commands.filter(move |command| (command.offered)(offer))
}

/// Returns the Optional NVM Command Support (ONCS) field of Identify Controller.
pub(crate) fn oncs(offer: Offer) -> Oncs {
    let bits = offered(offer).map(|command| command.oncs.into_bits());
    Oncs::from_bits(bits.fold(Oncs::new().into_bits(), |all, bits| all | bits))
}

/// Returns the entries of the Commands Supported and Effects log page for the NVM command set, or
/// for zoned namespaces.
pub(crate) fn effects(offer: Offer, zoned: bool) -> impl Iterator<Item = (Op, CommandEffects)> {
    let sort = if zoned {
        NamespaceType::Zoned
    } else {
        NamespaceType::Plain
    };
    let commands = offered(offer).filter(move |command| command.of(sort).is_some());
    commands.map(|command| (command.opcode, command.effects.with_csupp(true)))
}
