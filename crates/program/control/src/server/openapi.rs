//! The OpenAPI document.

use super::calls;
use utoipa::OpenApi;

#[derive(OpenApi)]
#[openapi(
    info(
        title = "vnvme",
        version = "1",
        description = "Management of a running vnvme through its control socket. Fields and \
                       resources may be added within a version.",
        license(name = "MIT OR Apache-2.0", identifier = "MIT OR Apache-2.0"),
    ),
    servers((url = "http://localhost", description = "curl --unix-socket /run/vnvme/control.sock")),
    paths(
        calls::list,
        calls::show,
        calls::add,
        calls::remove,
        calls::accept,
        calls::attach,
        calls::detach,
        calls::resize,
        calls::list_exports,
        calls::export,
        calls::unexport,
        calls::apply,
        calls::reload,
        calls::upgrade,
        calls::save,
        calls::stats,
        calls::metrics,
        calls::page,
        calls::openapi,
        calls::list_limits,
        calls::limits,
        calls::list_on_error,
        calls::on_error,
        calls::list_paths,
        calls::paths,
        calls::list_ana,
        calls::ana,
        calls::list_devices,
        calls::suspend,
        calls::resume,
        calls::events,
    )
)]
struct Document;

/// Returns the OpenAPI description of the API as formatted JSON.
pub(super) fn document() -> String {
    let text = Document::openapi().to_pretty_json();
    text.unwrap_or_default() + "\n"
}
