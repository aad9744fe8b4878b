//! The I/O commands of the NVM command set, each stated once: from a row come dispatch, the
//! Commands Supported and Effects log page, and ONCS of Identify Controller.
//!
//! Plain reads and writes are recognised before (`run`); those that are not plain are dispatched
//! here, too.

use super::Engine;
use nvme::identify::Oncs;
use nvme::log::CommandEffects;
use nvme::{Command, NvmOpcode as Op, Status};

/// Starts a command of a submission queue.
type Handler = fn(&mut Engine, sqid: u16, &Command) -> Result<(), Status>;

/// One I/O command.
struct IoCommand {
    opcode: Op,
    handler: Handler,
    effects: CommandEffects,
    oncs: Oncs,
}

impl IoCommand {
    const fn new(opcode: Op, handler: Handler, effects: CommandEffects) -> Self {
        IoCommand {
            opcode,
            handler,
            effects,
            oncs: Oncs::new(),
        }
    }

    /// The bit by which Identify Controller says that the command is there.
    const fn oncs(self, oncs: Oncs) -> Self {
        IoCommand { oncs, ..self }
    }
}

/// Effects of a command that reads.
const NOTHING: CommandEffects = CommandEffects::new();
/// Effects of a command that writes.
const CONTENT: CommandEffects = CommandEffects::new().with_lbcc(true);

/// Every I/O command, by opcode.
static COMMANDS: &[IoCommand] = &[
    IoCommand::new(Op::FLUSH, Engine::flush, NOTHING),
    IoCommand::new(Op::WRITE, Engine::read_write, CONTENT),
    IoCommand::new(Op::READ, Engine::read_write, NOTHING),
    IoCommand::new(Op::COMPARE, Engine::compare, NOTHING).oncs(Oncs::new().with_nvmcmps(true)),
    IoCommand::new(Op::WRITE_ZEROES, Engine::write_zeroes, CONTENT)
        .oncs(Oncs::new().with_nvmwzsv(true)),
    IoCommand::new(Op::DATASET_MANAGEMENT, Engine::dataset_management, CONTENT)
        .oncs(Oncs::new().with_nvmdsmsv(true)),
    IoCommand::new(Op::VERIFY, Engine::verify, NOTHING).oncs(Oncs::new().with_nvmvfys(true)),
];

/// What starts the command; `None` when there is no such command.
pub(super) fn handler(opcode: Op) -> Option<Handler> {
    let command = COMMANDS.iter().find(|command| command.opcode == opcode)?;
    Some(command.handler)
}

/// What Identify Controller says about the commands.
pub(crate) fn oncs() -> Oncs {
    let bits = COMMANDS.iter().map(|command| command.oncs.into_bits());
    Oncs::from_bits(bits.fold(Oncs::new().into_bits(), |all, bits| all | bits))
}

/// What the Commands Supported and Effects log page says about the commands.
pub(crate) fn effects() -> impl Iterator<Item = (Op, CommandEffects)> {
    COMMANDS
        .iter()
        .map(|command| (command.opcode, command.effects.with_csupp(true)))
}
