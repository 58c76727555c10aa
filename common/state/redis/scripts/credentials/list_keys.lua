-- uses: credentials
-- All processes that are let in.
local rows = {}
for _, host in ipairs(redis.call('SMEMBERS', ADMITTED)) do
  for _, role in ipairs(args.roles) do
    for public, shown in pairs(read_hash(keys_of_role(role, host))) do
      if not is_bulk(public) then
        rows[#rows + 1] = {role = role, host = host, public_key = public,
          process = string.match(shown, ' (.*)$') or shown}
      end
    end
  end
end
return cjson.encode({rows = rows})
