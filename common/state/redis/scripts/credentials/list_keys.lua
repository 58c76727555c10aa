-- uses: credentials
-- Answers the registered keys of all admitted hosts, without those of bulk ports.
local rows = {}
for _, host in ipairs(redis.call('SMEMBERS', ADMITTED)) do
  for _, role in ipairs(args.roles) do
    for public, value in pairs(read_hash(keys_of_role(role, host))) do
      if not is_bulk(public) then
        rows[#rows + 1] = {role = role, host = host, public_key = public,
          process = string.match(value, ' (.*)$') or value}
      end
    end
  end
end
return cjson.encode({rows = rows})
