//! The commands that tests give, with their data in guest memory.

use std::os::unix::fs::FileExt;

use nvme::cmd::admin::{Cns, IdentifyCdw10};
use nvme::cmd::io::RwCdw12;
use nvme::identify::{Descriptor, IdentifyController, IdentifyNamespace, NamespaceDescriptors};
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use test_host::prps;
use zerocopy::FromBytes;

use super::{AT_DATA, AT_LIST, AT_PAGE, Host, RAM_BASE};

impl Host {
    fn identify<T: FromBytes>(&mut self, nsid: u32, cns: Cns) -> Result<T, Status> {
        let mut command = Command::new(AdminOpcode::IDENTIFY.0, 0, nsid);
        command.set_prps(RAM_BASE + AT_PAGE, 0);
        command.cdw10 = IdentifyCdw10::new().with_cns(cns).into_bits().into();
        self.run(0, command).status().into_result()?;
        let mut page = [0; 4096];
        self.ram.read_exact_at(&mut page, AT_PAGE).unwrap();
        Ok(T::read_from_bytes(&page).ok().unwrap())
    }

    pub fn identify_controller(&mut self) -> IdentifyController {
        self.identify(0, Cns::CONTROLLER).unwrap()
    }

    pub fn identify_namespace(&mut self, nsid: u32) -> Result<IdentifyNamespace, Status> {
        self.identify(nsid, Cns::NAMESPACE)
    }

    /// Returns the UUID of a namespace (Namespace Identification Descriptor list); zeroes if it has
    /// none.
    pub fn uuid(&mut self, nsid: u32) -> [u8; 16] {
        let list: NamespaceDescriptors = self.identify(nsid, Cns::NAMESPACE_DESCRIPTORS).unwrap();
        let uuids = list.iter().filter_map(|descriptor| match descriptor {
            Descriptor::Uuid(uuid) => Some(uuid),
            _ => None,
        });
        uuids.last().unwrap_or_default()
    }

    /// A read or write command with its data at `at` in guest memory.
    pub fn transfer(&self, opcode: NvmOpcode, nsid: u32, lba: u64, len: usize, at: u64) -> Command {
        let mut command = Command::new(opcode.0, 0, nsid);
        command.set_slba(lba);
        command.cdw12 = RwCdw12::new()
            .with_nlb_z((len / self.block - 1) as u16)
            .into_bits()
            .into();
        let (data, list) = (RAM_BASE + at, RAM_BASE + AT_LIST);
        let (prp1, prp2) = prps(&self.host.ram, 4096, data, len as u64, list).unwrap();
        command.set_prps(prp1, prp2);
        command
    }

    pub fn write_with(&mut self, nsid: u32, lba: u64, data: &[u8], fua: bool) -> Status {
        self.ram.write_all_at(data, AT_DATA).unwrap();
        let mut command = self.transfer(NvmOpcode::WRITE, nsid, lba, data.len(), AT_DATA);
        command.cdw12 = RwCdw12::from_bits(command.cdw12.get())
            .with_fua(fua)
            .into_bits()
            .into();
        self.run(1, command).status()
    }

    pub fn write(&mut self, nsid: u32, lba: u64, data: &[u8]) {
        assert_eq!(self.write_with(nsid, lba, data, false), Status::SUCCESS);
    }

    pub fn read(&mut self, nsid: u32, lba: u64, len: usize) -> Vec<u8> {
        // Memory that is not read must not look as if it were.
        self.ram.write_all_at(&vec![0xee; len], AT_DATA).unwrap();
        let command = self.transfer(NvmOpcode::READ, nsid, lba, len, AT_DATA);
        assert_eq!(self.run(1, command).status(), Status::SUCCESS);
        let mut data = vec![0; len];
        self.ram.read_exact_at(&mut data, AT_DATA).unwrap();
        data
    }

    pub fn flush(&mut self, nsid: u32) {
        let command = Command::new(NvmOpcode::FLUSH.0, 0, nsid);
        assert_eq!(self.run(1, command).status(), Status::SUCCESS);
    }
}
