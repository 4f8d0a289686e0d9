// The key that "Authorize" asks for is sent with each request, and with the document itself once it is known.
"use strict";

SwaggerUIBundle({
  url: new URL("openapi.json", document.baseURI).pathname,
  dom_id: "#api",
  deepLinking: true,
  validatorUrl: null,
  persistAuthorization: false,
});
